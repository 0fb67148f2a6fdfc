"""Watch for nodes that Ray is about to remove.

They are polled, because no event reports them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from drawbar._process.errors import PreemptionInfo
from drawbar._process.ranks import WorkerInfo
from drawbar._process.threads import run_in_daemon_thread
from drawbar._records.event_stream import Emit
from drawbar._records.live_events import Notice

DRAIN_CHECK_SECONDS = 2.0
GCS_NOTICE_S = 10.0
"""Time that Ray's control service may take to reply before a notice is emitted."""

_GCS_UNRESPONSIVE = (
    "Ray's control service (GCS) does not respond. Training continues for now. If the service is "
    "dead, Ray ends this process after a minute. To resume from the latest checkpoint, start the "
    "run again with the same name."
)


@dataclass(frozen=True)
class NodesDraining:
    """Event: Ray is about to remove nodes. It is repeated while nodes are draining.

    Attributes:
        nodes: Draining nodes: id to deadline in ms since the epoch, 0 if unknown.
    """

    nodes: Mapping[str, int]


class NodeWatcher:
    """Poll Ray for draining nodes.

    Args:
        get_draining_nodes: `RunAssignmentPlanner.get_draining_nodes`.
        put_event: Puts an event on the controller's queue.
        emit: Callback that publishes events.
    """

    def __init__(
        self,
        get_draining_nodes: Callable[[], dict[str, int]],
        put_event: Callable[[NodesDraining], None],
        emit: Emit,
    ) -> None:
        self._get_draining_nodes = get_draining_nodes
        self._put_event = put_event
        self._emit = emit

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(DRAIN_CHECK_SECONDS)
            if nodes := await self._query_draining_nodes():
                self._put_event(NodesDraining(nodes))

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


def find_preemption(
    workers: Sequence[WorkerInfo], draining: Mapping[str, int]
) -> PreemptionInfo | None:
    """Return the preemption of the workers on draining nodes, or None if there are none.

    Args:
        workers: Process of each rank, in rank order.
        draining: Draining nodes: id to deadline in ms since the epoch, 0 if unknown.
    """
    ranks: dict[str, list[int]] = {}
    for rank, worker in enumerate(workers):
        if worker.node_id in draining:
            ranks.setdefault(worker.node_id, []).append(rank)
    if not ranks:
        return None
    deadlines = [draining[node] for node in ranks if draining[node]]
    return PreemptionInfo(min(deadlines, default=None), ranks)
