"""Nodes that are about to go, of which Ray says nothing by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from drawbar.train._controller.attempt import Attempt
from drawbar.train._history.events import PreemptionAnnounced
from drawbar.train._history.stream import Emit
from drawbar.train._threads import in_daemon_thread

DRAIN_CHECK_SECONDS = 2.0


class NodeWatch:
    """Looks now and then whether nodes of the attempt are about to go, and tells it.

    Args:
        draining: Gives such nodes, by id, as `Plan.draining` does.
        current: Gives the attempt, None while there is none.
        emit: Tells events.
    """

    def __init__(
        self,
        draining: Callable[[], dict[str, int]],
        current: Callable[[], Attempt | None],
        emit: Emit,
    ) -> None:
        self._draining = draining
        self._current = current
        self._emit = emit

    async def watch(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(DRAIN_CHECK_SECONDS)
            draining = await in_daemon_thread(self._draining)
            attempt = self._current()
            info = attempt.preempted(draining) if attempt is not None else None
            if info is not None:
                self._emit(PreemptionAnnounced(info))
