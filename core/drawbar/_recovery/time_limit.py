"""Time limit of a run, and of the wait for the checkpoint that is requested before it stops."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from drawbar._records.event_stream import Emit
from drawbar._records.live_events import Notice

MIN_SAVE_WAIT_S = 60.0
"""Minimum time that ranks have to report or to call `should_checkpoint()` after a request.

If a rank has needed longer between two calls, for example in an evaluation, this time is added.
"""

NO_RANK_SAVES = (
    "The run stops without another checkpoint: since the request, no rank has called report() or "
    "should_checkpoint(). To save sooner, call should_checkpoint() also in long evaluations"
)

MAX_SLEEP_S = 3600.0
"""The clock may be set while a run waits for a time of day."""


class TimeLimit:
    """Request the end of the run at its time limit. Its time starts when this object is created.

    Args:
        max_time: `RunConfig.max_time`.
        stop_before: `RunConfig.stop_before`, as an absolute time.
        request_stop: Requests the end of the run, after its next checkpoint.
        emit: Callback that publishes events.
    """

    def __init__(
        self,
        max_time: float | timedelta | None,
        stop_before: datetime | float | timedelta | None,
        request_stop: Callable[[], None],
        emit: Emit,
    ) -> None:
        self._max_time = max_time
        self._stop_before = stop_before
        self._request_stop = request_stop
        self._emit = emit
        self._start = time.monotonic()

    async def run(self) -> None:
        """Wait for the limit, if there is one, and request the end of the run."""
        while (remaining := self._get_remaining_seconds()) > 0:
            await asyncio.sleep(min(remaining, MAX_SLEEP_S))
        self._emit(Notice("time limit: stopping after the next checkpoint"))
        self._request_stop()

    def _get_remaining_seconds(self) -> float:
        seconds = math.inf
        if isinstance(self._max_time, timedelta):
            seconds = self._max_time.total_seconds() - (time.monotonic() - self._start)
        if isinstance(self._stop_before, datetime):
            seconds = min(seconds, self._stop_before.timestamp() - time.time())
        return seconds
