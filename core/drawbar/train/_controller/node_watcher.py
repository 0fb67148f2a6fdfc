"""Watch for nodes that Ray is about to remove.

They are polled, because no event reports them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from drawbar.train._controller.attempt import Attempt
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import Notice, PreemptionAnnounced
from drawbar.train._threads import run_in_daemon_thread

DRAIN_CHECK_SECONDS = 2.0
GCS_NOTICE_S = 10.0
"""Time that Ray's control service may take to reply before a notice is emitted."""

_GCS_UNRESPONSIVE = (
    "Ray's control service (GCS) does not respond. Training continues for now. If the service is "
    "dead, Ray ends this process after a minute; then run the script again with "
    'RunConfig(resume="auto") to resume from the latest checkpoint.'
)


class NodeWatcher:
    """Poll Ray for draining nodes and announce the ones that the current attempt uses.

    Args:
        get_draining_nodes: Returns the draining nodes, as `AssignmentPlanner.get_draining_nodes`.
        get_attempt: Returns the current attempt; None while there is none.
        emit: Callback that publishes events.
    """

    def __init__(
        self,
        get_draining_nodes: Callable[[], dict[str, int]],
        get_attempt: Callable[[], Attempt | None],
        emit: Emit,
    ) -> None:
        self._get_draining_nodes = get_draining_nodes
        self._get_attempt = get_attempt
        self._emit = emit

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(DRAIN_CHECK_SECONDS)
            draining_nodes = await self._query_draining_nodes()
            attempt = self._get_attempt()
            info = attempt.on_draining_nodes(draining_nodes) if attempt is not None else None
            if info is not None:
                self._emit(PreemptionAnnounced(info))

    async def _query_draining_nodes(self) -> dict[str, int]:
        """Query Ray's control service, which does not respond while a head node is restarting."""
        query = asyncio.ensure_future(run_in_daemon_thread(self._get_draining_nodes))
        try:
            if not (await asyncio.wait([query], timeout=GCS_NOTICE_S))[0]:
                self._emit(Notice(_GCS_UNRESPONSIVE))
                await asyncio.wait([query])
                self._emit(Notice("Ray's control service (GCS) responds again."))
            return await query
        finally:
            query.cancel()
