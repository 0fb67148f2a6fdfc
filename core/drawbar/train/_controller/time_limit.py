"""Stop a run with a checkpoint before a time limit."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from drawbar._records.event_stream import Emit
from drawbar._records.live_events import Notice
from drawbar.train._config.run_config import RunConfig
from drawbar.train._controller.request_agreement import StopRequested

MAX_SLEEP_S = 3600.0
"""The clock may be set while a run waits for a time of day."""


class TimeLimit:
    """Request the end of the run at its time limit. Its time starts when this object is created.

    Args:
        config: Settings with `max_time` and the absolute time `stop_before`.
        put_event: Puts an event on the controller's queue.
        emit: Callback that publishes events.
    """

    def __init__(
        self, config: RunConfig, put_event: Callable[[StopRequested], None], emit: Emit
    ) -> None:
        self._max_time = config.max_time
        self._stop_before = config.stop_before
        self._put_event = put_event
        self._emit = emit
        self._start = time.monotonic()

    async def run(self) -> None:
        """Wait for the limit, if there is one, and request the end of the run."""
        while (remaining := self._get_remaining_seconds()) > 0:
            await asyncio.sleep(min(remaining, MAX_SLEEP_S))
        self._emit(Notice("time limit: stopping after the next checkpoint"))
        self._put_event(StopRequested(save=True))

    def _get_remaining_seconds(self) -> float:
        seconds = math.inf
        if isinstance(self._max_time, timedelta):
            seconds = self._max_time.total_seconds() - (time.monotonic() - self._start)
        if isinstance(self._stop_before, datetime):
            seconds = min(seconds, self._stop_before.timestamp() - time.time())
        return seconds
