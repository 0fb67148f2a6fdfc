"""Workers that a launcher such as torchrun has started, of which this process is rank 0.

Rank 0's function runs in the thread that called `fit()`, as with `num_workers=0`; the others run
theirs in the same way, each in its own process, and say over a wire what they have to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import ParamSpec, TypeVar

from drawbar.train._messages import Assignment, Gone, Ranks, WorkerInfo
from drawbar.train._orders import Interrupt, Order
from drawbar.train._serialization import Serialized, serialize
from drawbar.train._threads import run_in_daemon_thread
from drawbar.train._worker.stack import Stack, detect_stopped_process
from drawbar.train._worker_group.peers import (
    Answer,
    Begin,
    Ended,
    Execute,
    FromPeer,
    Lost,
    Obey,
    Peers,
    Said,
    StackAsked,
    StopAsked,
    peer_address,
)
from drawbar.train._worker_group.thread_group import ThreadWorkerGroup
from drawbar.train._worker_group.worker_group import OnMessages, OnWaiting

P = ParamSpec("P")
R = TypeVar("R")

JOIN_NOTICE_S = 5.0
STACK_SECONDS = 2.0
STOP_SECONDS = 1.0


class TorchrunWorkerGroup:
    """One worker in each process of a launcher's group.

    Args:
        own: Rank 0, in this process.
        here: Where that is.
        peers: The other processes.
        stop: Ends the run, in the name of a peer; gets whether to save first.
    """

    def __init__(
        self,
        local_group: ThreadWorkerGroup,
        local_info: WorkerInfo,
        server: Peers,
        stop: Callable[[bool], object],
    ) -> None:
        self._own = local_group
        self._here = local_info
        self._peers = server
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._attempt = -1
        self._hear: OnMessages = lambda rank, messages: None
        self._functions_ended: dict[
            int, asyncio.Event
        ] = {}  # by rank of a peer: its function has ended
        self._request_ids = itertools.count()
        self._pending_requests: dict[
            int, tuple[int, Future[Answer]]
        ] = {}  # by number: rank, and its answer
        self._lost_peers: dict[int, str] = {}  # by rank of a peer: why it says nothing any more
        server.hear(self._on_message_from_thread)

    @property
    def num_idle_workers(self) -> int:
        """Nobody comes late."""
        return 0

    def __len__(self) -> int:
        return 1 + self._peers.count

    async def start(self, on_wait: OnWaiting) -> list[WorkerInfo]:
        """Wait until every process has called `fit()`."""
        await self._own.start(on_wait)
        come = 0
        while come < self._peers.count:
            come = await run_in_daemon_thread(self._peers.wait, JOIN_NOTICE_S)
            if come < self._peers.count:
                on_wait(1 + come, True)
        return [self._here, *(self._peers.infos[rank] for rank in sorted(self._peers.infos))]

    def set_ranks(self, ranks: Sequence[Ranks]) -> None:
        """The launcher has given them."""

    def run(self, assignments: Sequence[Assignment], hear: OnMessages) -> None:
        """Begin an attempt."""
        self._attempt, self._hear = assignments[0].attempt, hear
        self._own.run([each for each in assignments if each.ranks.world_rank == 0], hear)
        for assignment in assignments:
            rank = assignment.ranks.world_rank
            if rank > 0:
                self._functions_ended[rank] = asyncio.Event()
                spec = dataclasses.replace(assignment.spec, surroundings=None)  # it has its own
                self._peers.send(rank, Begin(dataclasses.replace(assignment, spec=spec)))
        for rank, detail in list(self._lost_peers.items()):  # between its coming and now
            self._on_message(rank, Lost(detail))

    def _on_message_from_thread(self, rank: int, said: FromPeer) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._on_message, rank, said)

    def _on_message(self, rank: int, said: FromPeer) -> None:
        match said:
            case Said(message):
                self._hear(rank, [message])
            case Ended(message):
                self._functions_ended[rank].set()
                if message is not None:
                    self._hear(rank, [message])
            case Answer(number):
                self._resolve_request(number, said)
            case StopAsked(save):
                self._stop(save)
            case Lost(detail):
                self._lost_peers[rank] = detail
                # Who has asked it waits in a thread, and nobody would answer any more.
                for number, (asked, _) in list(self._pending_requests.items()):
                    if asked == rank:
                        self._resolve_request(number, Answer(number, error=detail))
                if rank in self._functions_ended:
                    self._functions_ended[rank].set()
                self._hear(rank, [Gone(detail=detail, time=time.time())])

    def send_command(self, rank: int, order: Order) -> None:
        """Give one rank an order."""
        if rank == 0:
            self._own.send_command(rank, order)
        else:
            self._peers.send(rank, Obey(self._attempt, order))

    async def end_attempt(
        self,
        *,
        grace: float,
        should_keep: bool,
        should_replace: bool,
        is_user_request: bool = False,
    ) -> None:
        """Interrupt every running function and wait for it: what a launcher started, it kills."""
        running = {rank: done for rank, done in self._functions_ended.items() if not done.is_set()}
        for rank in running:
            self.send_command(
                rank, Interrupt(reason="the attempt is over", by_user=is_user_request)
            )
        local_group = self._own.end_attempt(
            grace=grace, should_keep=should_keep, should_replace=should_replace
        )
        waits = [asyncio.wait_for(done.wait(), grace) for done in running.values()]
        # One that does not stop in time is the launcher's to kill; the others still get theirs.
        await asyncio.gather(local_group, *waits, return_exceptions=True)

    async def collect_stacks(self) -> dict[int, Stack | None]:
        """Ask every rank where its threads stand; None for one that does not answer."""
        ranks = sorted(self._functions_ended)
        asked = [asyncio.wrap_future(self._request(rank, StackAsked)) for rank in ranks]
        if asked:
            await asyncio.wait(asked, timeout=STACK_SECONDS)
        found = await self._own.collect_stacks()
        for rank, each in zip(ranks, asked, strict=True):
            answer = each.result().value if each.done() else None
            found[rank] = answer if isinstance(answer, Stack) else self._detect_stopped_peer(rank)
            each.cancel()
        return found

    def _detect_stopped_peer(self, rank: int) -> Stack | None:
        """Look whether a peer is stopped, if it is on this machine."""
        peer = self._peers.infos[rank]
        return detect_stopped_process(peer.pid) if peer.hostname == self._here.hostname else None

    def _request(
        self, rank: int, question: Callable[[int], StackAsked | Execute]
    ) -> Future[Answer]:
        """Ask a peer something, from any thread."""
        number, answer = next(self._request_ids), Future[Answer]()
        self._pending_requests[number] = rank, answer
        self._peers.send(rank, question(number))
        if rank in self._lost_peers:  # looked at last: whoever is lost from now on is told of
            self._resolve_request(number, Answer(number, error=self._lost_peers[rank]))
        return answer

    def _resolve_request(self, number: int, answer: Answer) -> None:
        _, asked = self._pending_requests.pop(number, (-1, None))
        # Whoever has asked may have waited long enough.
        if asked is not None and asked.set_running_or_notify_cancel():
            asked.set_result(answer)

    def relocate_on_next_start(self) -> None:
        """The launcher has placed them."""

    async def stop(self) -> None:
        """Interrupt what still runs."""
        await self.end_attempt(grace=STOP_SECONDS, should_keep=True, should_replace=False)

    def kill(self) -> None:
        """What the launcher has started, it kills."""

    def execute_single(
        self, rank: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a function on one worker and wait for its result.

        Raises:
            RuntimeError: It raised there, or its process is gone.
        """
        if rank == 0:
            return function(*args, **kwargs)
        call = serialize((function, args, kwargs))
        result: R = _get_result(
            rank, self._request(rank, partial(Execute, call=call))
        ).deserialize()
        return result

    def execute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run a function on every worker and wait for all results, in rank order.

        Raises:
            RuntimeError: It raised on a peer, or a process is gone.
        """
        # Packed once for all of them.
        question = partial(Execute, call=serialize((function, args, kwargs)))
        asked = {rank: self._request(rank, question) for rank in sorted(self._peers.infos)}
        local_group = function(
            *args, **kwargs
        )  # meanwhile: the ranks may wait for each other in it
        return [
            local_group,
            *(_get_result(rank, each).deserialize() for rank, each in asked.items()),
        ]

    # Without Ray there are no references: these give the results themselves.
    execute_single_async = execute_single
    execute_async = execute


def _get_result(rank: int, asked: Future[Answer]) -> Serialized:
    answer = asked.result()
    if isinstance(answer.value, Serialized):
        return answer.value
    raise RuntimeError(f"rank {rank}, in what a hook of the backend runs there: {answer.error}")


def make_local_worker_info(ranks: Ranks, gpu_ids: tuple[str, ...]) -> WorkerInfo:
    """Say where this process is. Two nodes of a launcher may be one machine."""
    host = os.uname().nodename
    return WorkerInfo(
        node_id=f"{ranks.node_rank}@{host}",
        node_ip=peer_address(ranks),
        hostname=host,
        pid=os.getpid(),
        gpu_ids=gpu_ids,
    )
