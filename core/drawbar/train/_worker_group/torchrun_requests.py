"""Requests from rank 0 to other processes of a torchrun group, and their replies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future

from drawbar.train._protocol.messages import WorkerDied
from drawbar.train._serialization import Serialized
from drawbar.train._worker_group.torchrun_messages import (
    CaptureStack,
    ExecuteFunction,
    PeerReply,
)
from drawbar.train._worker_group.torchrun_server import TorchrunServer


class PeerRequests:
    """Requests to peers that have not been answered yet.

    Args:
        server: Connections to the peers.
    """

    def __init__(self, server: TorchrunServer) -> None:
        self._server = server
        self._ids = itertools.count()
        # Rank and reply, by request ID.
        self._pending: dict[int, tuple[int, Future[PeerReply]]] = {}
        self._lost_peers: dict[int, WorkerDied] = {}

    def send(
        self, rank: int, make_request: Callable[[int], CaptureStack | ExecuteFunction]
    ) -> Future[PeerReply]:
        """Send a request to a peer, from any thread."""
        request_id, reply = next(self._ids), Future[PeerReply]()
        self._pending[request_id] = rank, reply
        self._server.send([rank], make_request(request_id))
        # Checked last: a loss from now on resolves the pending requests of the peer.
        if rank in self._lost_peers:
            self._fail(request_id, self._lost_peers[rank])
        return reply

    def on_reply(self, reply: PeerReply) -> None:
        """Resolve a request."""
        _, pending = self._pending.pop(reply.request_id, (-1, None))
        # The requesting thread may have stopped waiting.
        if pending is not None and pending.set_running_or_notify_cancel():
            pending.set_result(reply)

    def on_peer_lost(self, rank: int, death: WorkerDied) -> None:
        """Fail all requests to a peer: threads are waiting for replies that it will never send."""
        self._lost_peers[rank] = death
        for request_id, (requested_rank, _) in list(self._pending.items()):
            if requested_rank == rank:
                self._fail(request_id, death)

    def _fail(self, request_id: int, death: WorkerDied) -> None:
        self.on_reply(PeerReply(request_id=request_id, error=death.detail))


def get_result(rank: int, pending: Future[PeerReply]) -> Serialized:
    """Wait for the reply of a peer and return its value.

    Raises:
        RuntimeError: The peer replied with an error, or its process died.
    """
    reply = pending.result()
    if reply.value is not None:
        return reply.value
    raise RuntimeError(f"a hook of the backend failed on rank {rank}: {reply.error}")
