"""Worker group of processes that torchrun started.

This process is rank 0. The training function of each rank runs in the thread that called `fit()`,
as with `num_workers=0`. The other ranks send their messages to rank 0 over a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, TypeVar

import cloudpickle

from drawbar._modes.fixed_processes import FixedProcesses
from drawbar._modes.thread_group import ThreadWorkerGroup
from drawbar._modes.torchrun_messages import (
    CaptureStack,
    ExecuteFunction,
    FunctionCancelled,
    PeerReply,
    ReceivedMessage,
    StartAttempt,
    StopRequested,
)
from drawbar._modes.torchrun_server import TorchrunServer, get_peer_address
from drawbar._process.rank_assignment import rank_workers
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.serialization import Serialized, serialize
from drawbar._process.stack import Stack, detect_stopped_process
from drawbar._process.threads import run_in_daemon_thread
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.commands import Command
from drawbar.train._protocol.messages import FINAL_MESSAGE_TYPES, WorkerDied
from drawbar.train._worker_group.worker_group import (
    AttemptEnd,
    OnMessages,
    OnWaiting,
)

P = ParamSpec("P")
R = TypeVar("R")

JOIN_NOTICE_S = 5.0
STACK_SECONDS = 2.0
STOP_SECONDS = 1.0


class TorchrunWorkerGroup(FixedProcesses):
    """One worker in each process of a torchrun group.

    Args:
        local_group: Group that contains rank 0, in this process.
        local_info: Node and process of rank 0.
        server: Connections to the other processes.
        stop_run: Stops the run when a peer requests it. Receives whether to save first.
    """

    def __init__(
        self,
        local_group: ThreadWorkerGroup,
        local_info: WorkerInfo,
        server: TorchrunServer,
        stop_run: Callable[[bool | None], object],
    ) -> None:
        self._local_group = local_group
        self._local_info = local_info
        self._server = server
        self._stop_run = stop_run
        self._loop = asyncio.get_running_loop()
        self._on_messages: OnMessages = lambda rank, messages: None
        self._functions_ended: dict[int, asyncio.Event] = {}  # by rank of a peer
        self._requests = PeerRequests(server)
        self._lost_peers: dict[int, WorkerDied] = {}
        server.set_handler(self._on_message_from_thread)

    @property
    def num_idle_workers(self) -> int:
        """Always 0: the number of processes is fixed."""
        return 0

    def __len__(self) -> int:
        return 1 + self._server.count

    async def start(self, on_waiting: OnWaiting) -> list[tuple[WorkerInfo, Ranks]]:
        """Wait until every process has called `fit()`."""
        await self._local_group.start(on_waiting)
        num_joined = 0
        while num_joined < self._server.count:
            num_joined = await run_in_daemon_thread(self._server.wait_for_peers, JOIN_NOTICE_S)
            if num_joined < self._server.count:
                on_waiting(1 + num_joined, True)
        peers = [self._server.worker_infos[rank] for rank in sorted(self._server.worker_infos)]
        return rank_workers([self._local_info, *peers])

    def run(self, assignments: Sequence[WorkerAssignment], on_messages: OnMessages) -> None:
        """Start an attempt."""
        self._on_messages = on_messages
        local = [assignment for assignment in assignments if assignment.ranks.world_rank == 0]
        self._local_group.run(local, on_messages)
        for assignment in assignments:
            rank = assignment.ranks.world_rank
            if rank > 0:
                self._functions_ended[rank] = asyncio.Event()
                # Peers have an environment already.
                spec = dataclasses.replace(assignment.spec, driver_env=None)
                assignment = dataclasses.replace(assignment, spec=spec)
                # cloudpickle, as Ray does: the function that opens the shards may be a closure.
                self._server.send([rank], StartAttempt(cloudpickle.dumps(assignment)))
        for rank, death in list(self._lost_peers.items()):  # lost after it joined
            self._on_message(rank, death)

    def _on_message_from_thread(self, rank: int, message: ReceivedMessage) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended
            self._loop.call_soon_threadsafe(self._on_message, rank, message)

    def _on_message(self, rank: int, message: ReceivedMessage) -> None:
        match message:
            case PeerReply():
                self._requests.on_reply(message)
            case StopRequested(save=save):
                self._stop_run(save)
            case FunctionCancelled():
                self._set_function_ended(rank)
            case WorkerDied():
                self._lost_peers[rank] = message
                self._requests.on_peer_lost(rank, message)
                self._set_function_ended(rank)
                self._on_messages(rank, [message])
            case _:
                if isinstance(message, FINAL_MESSAGE_TYPES):
                    self._set_function_ended(rank)
                self._on_messages(rank, [message])

    def _set_function_ended(self, rank: int) -> None:
        if rank in self._functions_ended:  # not before the first attempt
            self._functions_ended[rank].set()

    def send_command(self, rank: int, command: Command) -> None:
        """Send a command to a rank."""
        self.broadcast_command([rank], command)

    def broadcast_command(self, ranks: Collection[int], command: Command) -> None:
        """Send a command to several ranks."""
        if 0 in ranks:
            self._local_group.send_command(0, command)
        self._server.send([rank for rank in ranks if rank > 0], command)

    async def end_attempt(self, end: AttemptEnd) -> None:
        """Interrupt and wait for every running function. Only torchrun kills its processes."""
        running = {
            rank: ended for rank, ended in self._functions_ended.items() if not ended.is_set()
        }
        self.broadcast_command(running, end.interrupt)
        local_end = self._local_group.end_attempt(end)
        peer_ends = [asyncio.wait_for(ended.wait(), end.grace) for ended in running.values()]
        # A function that does not stop in time must not shorten the time of the others.
        await asyncio.gather(local_end, *peer_ends, return_exceptions=True)

    async def collect_stacks(self) -> dict[int, Stack | None]:
        """Return the stack of every rank, or None for a rank that does not reply."""
        ranks = sorted(self._functions_ended)
        requests = [asyncio.wrap_future(self._requests.send(rank, CaptureStack)) for rank in ranks]
        if requests:
            await asyncio.wait(requests, timeout=STACK_SECONDS)
        stacks = await self._local_group.collect_stacks()
        for rank, request in zip(ranks, requests, strict=True):
            stack = request.result().stack if request.done() else None
            stacks[rank] = stack or self._detect_stopped_peer(rank)
            request.cancel()
        return stacks

    def _detect_stopped_peer(self, rank: int) -> Stack | None:
        """Return a stack that describes a suspended peer, if it is suspended and on this host."""
        peer = self._server.worker_infos[rank]
        return (
            detect_stopped_process(peer.pid) if peer.hostname == self._local_info.hostname else None
        )

    async def stop(self) -> None:
        """Interrupt running functions."""
        await self.end_attempt(AttemptEnd(grace=STOP_SECONDS))

    def kill(self) -> None:
        """Do nothing: torchrun kills its processes."""

    def execute_single(
        self, rank: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a function on one worker and wait for its result.

        Raises:
            RuntimeError: The function raised an exception on a peer, or its process died.
        """
        if rank == 0:
            return function(*args, **kwargs)
        call = serialize((function, args, kwargs))
        result: R = _get_result(
            rank, self._requests.send(rank, partial(ExecuteFunction, call=call))
        ).deserialize()
        return result

    def execute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a function on every worker and wait for all results, in rank order.

        Raises:
            RuntimeError: The function raised an exception on a peer, or a process died.
        """
        # Pickled once for all peers.
        make_request = partial(ExecuteFunction, call=serialize((function, args, kwargs)))
        replies = {
            rank: self._requests.send(rank, make_request)
            for rank in sorted(self._server.worker_infos)
        }
        # Called while the peers run it: the ranks may wait for each other in it.
        local_result = function(*args, **kwargs)
        return [
            local_result,
            *(_get_result(rank, reply).deserialize() for rank, reply in replies.items()),
        ]

    # There are no object references without Ray, so these return the results.
    execute_single_async = execute_single
    execute_async = execute


def make_local_worker_info(ranks: Ranks, gpu_ids: tuple[str, ...]) -> WorkerInfo:
    """Return the node and process of this rank. Two torchrun nodes may be on one machine."""
    hostname = os.uname().nodename
    return WorkerInfo(
        node_id=f"{ranks.node_rank}@{hostname}",
        node_ip=get_peer_address(ranks),
        hostname=hostname,
        pid=os.getpid(),
        gpu_ids=gpu_ids,
    )


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


def _get_result(rank: int, pending: Future[PeerReply]) -> Serialized:
    """Wait for the reply of a peer and return its value.

    Raises:
        RuntimeError: The peer replied with an error, or its process died.
    """
    reply = pending.result()
    if reply.value is not None:
        return reply.value
    raise RuntimeError(f"a hook of the backend failed on rank {rank}: {reply.error}")
