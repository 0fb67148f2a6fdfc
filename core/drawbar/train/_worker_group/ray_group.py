"""The workers of a run on Ray: one call and one stream of what it says for each rank.

Ranks are given from outside with each attempt, to processes of an `ActorPool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drawbar.train._errors import WorkerFailure
from drawbar.train._messages import Assignment, Failed, Gone, Message, Ranks, Retired, WorkerInfo
from drawbar.train._orders import Interrupt, Order
from drawbar.train._serialization import Serialized, serialize
from drawbar.train._threads import run_in_daemon_thread
from drawbar.train._worker.stack import Stack, detect_stopped_process
from drawbar.train._worker_group.actor_pool import ActorPool, ActorSlot, await_reference
from drawbar.train._worker_group.cluster import hide_deaths_of, is_node_available
from drawbar.train._worker_group.worker_group import OnMessages, OnWaiting

P = ParamSpec("P")
R = TypeVar("R")

SHUTDOWN_S = 2.0
STACK_SECONDS = 2.0
STOP_CHECK_S = 5.0  # Ray may have to start a process for that


class RayWorkerGroup:
    """Workers as Ray actors: what they are told, and what they say.

    Args:
        pool: Their processes.
        payload: What every rank runs.
    """

    def __init__(self, pool: ActorPool, payload: ray.ObjectRef[Serialized]) -> None:
        self._pool = pool
        self._payload = [payload]  # until stop(); Ray does not follow a reference in a list
        self._ranks: dict[int, ActorSlot] = {}
        self._attempt = -1
        self._undelivered_commands: set[asyncio.Future[None]] = set()  # not taken yet

    def __len__(self) -> int:
        return len(self._ranks)

    # -- processes

    async def start(self, on_wait: OnWaiting) -> list[WorkerInfo]:
        """Create what is missing, all at once, and wait until enough processes are up."""
        workers = await self._pool.start(on_wait)
        hide_deaths_of(workers)
        return workers

    @property
    def num_idle_workers(self) -> int:
        """Processes that came up too late for the attempt."""
        return sum(member.run_task is None for member in self._pool.list_ready())

    # -- one attempt

    def set_ranks(self, ranks: Sequence[Ranks]) -> None:
        """Learn the rank of each worker that `start` gave."""
        # Who has come since then is a spare, and gets no rank.
        pairs = zip(ranks, self._pool.list_ready(), strict=False)
        self._ranks = {each.world_rank: member for each, member in pairs}

    def run(self, assignments: Sequence[Assignment], hear: OnMessages) -> None:
        """Begin an attempt: one call per worker, whose stream is read from now on."""
        self._attempt = assignments[0].attempt
        for assignment in assignments:
            rank = assignment.ranks.world_rank
            member = self._ranks[rank]
            # A stream rather than calls of the driver: the worker says things in one order, Ray
            # delivers them in that order, and its end tells of a death.
            run = member.actor.run.options(num_returns="streaming")
            stream = run.remote(assignment, self._payload)
            member.on_messages = hear
            member.run_task = asyncio.ensure_future(
                self._receive_messages(rank, member, stream, hear)
            )

    async def _receive_messages(
        self,
        rank: int,
        member: ActorSlot,
        stream: AsyncIterator[Awaitable[list[Message]]],
        hear: OnMessages,
    ) -> None:
        try:
            async for reference in stream:
                messages = await reference
                # Noted before the attempt hears: it may end by this very message, and then keeps or
                # discards the process.
                member.is_retired |= any(isinstance(each, Retired) for each in messages)
                hear(rank, messages)
        # The function's own exceptions are messages, so this is Drawbar's code in the worker, or a
        # message that does not unpickle here. The process is of no use any more.
        except RayTaskError as error:
            member.is_marked_dead = True
            hear(rank, [Failed(failure=describe_worker_error(rank, error))])
        except RayError as error:
            member.is_marked_dead = True
            # In a thread: it calls the node, which may not answer.
            hear(
                rank,
                [
                    await run_in_daemon_thread(
                        _make_worker_died, error, member.info.result().node_id
                    )
                ],
            )

    def send_command(self, rank: int, order: Order) -> None:
        """Give one rank an order; one that it cannot take fails it.

        If its process is dead, its stream tells.
        """
        member = self._ranks[rank]
        control = member.actor.obey.options(concurrency_group="control")
        taken = asyncio.ensure_future(await_reference(control.remote(self._attempt, order)))
        self._undelivered_commands.add(taken)
        taken.add_done_callback(partial(self._on_command_delivered, rank, member))

    def _on_command_delivered(
        self, rank: int, member: ActorSlot, taken: asyncio.Future[None]
    ) -> None:
        self._undelivered_commands.discard(taken)
        error = None if taken.cancelled() else taken.exception()
        if isinstance(error, RayTaskError) and member.on_messages is not None:
            member.is_marked_dead = True
            member.on_messages(rank, [Failed(failure=describe_worker_error(rank, error))])

    async def collect_stacks(self) -> dict[int, Stack | None]:
        """Ask every rank where its threads stand; None for one that does not answer."""
        answers = await asyncio.gather(*[_request_stack(member) for member in self._ranks.values()])
        return dict(zip(self._ranks, answers, strict=True))

    async def end_attempt(
        self,
        *,
        grace: float,
        should_keep: bool,
        should_replace: bool,
        is_user_request: bool = False,
    ) -> None:
        """Interrupt every running function; kill whoever has not stopped in `grace` seconds."""
        members = self._pool.slots
        taking_part = [slot for slot, member in members.items() if member.run_task is not None]
        dead = [slot for slot, member in members.items() if member.is_dead]
        # First of all: their replacements come up while the others are still stopping.
        self._pool.kill_slots(dead, should_replace=should_replace)
        running = {rank: each.run_task for rank, each in self._ranks.items() if each.is_running}
        for rank in running:
            self.send_command(
                rank, Interrupt(reason="the attempt is over", by_user=is_user_request)
            )
        if running:
            await asyncio.wait([task for task in running.values() if task], timeout=grace)
        # A process is kept if its stream has ended: only then has its thread left user code, and
        # nothing of the old attempt is written any more.
        still_there = members.keys()  # none of them, if kill() was called meanwhile
        for slot in (set(taking_part) - set(dead)) & still_there:
            member = members[slot]
            if member.is_dead or member.is_running or member.is_retired or not should_keep:
                self._pool.kill_slots([slot], should_replace=should_replace)
            member.run_task = None

    def relocate_on_next_start(self) -> None:
        """Give up every process and their placement: the next start places all of them anew."""
        self.kill()

    # -- the end

    async def stop(self) -> None:
        """Let idle processes run their exit handlers, kill all, give up their placement.

        A kill ends a process within some ten milliseconds; its own end would take it seconds.
        """
        leaving = [
            asyncio.ensure_future(_shut_down_actor(member))
            for member in self._pool.list_ready()
            if not member.is_dead
        ]
        if leaving:
            # Ray runs no atexit handlers of a killed actor (ray-project/ray#12805), so the worker
            # is asked to.
            await asyncio.wait(leaving, timeout=SHUTDOWN_S)
        self.kill()
        # Ray keeps what a reference refers to for as long as anybody holds it; a `RunHandle` may
        # live on.
        self._payload.clear()

    def kill(self) -> None:
        """Kill every process and give up their placement."""
        self._pool.kill_all()

    # -- the view that backends get

    def execute_single_async(
        self, rank: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> ray.ObjectRef[R]:
        """Run a function on one worker; gives an object reference."""
        asked = self._ranks[rank].actor.execute.remote(serialize((function, args, kwargs)))
        return cast("ray.ObjectRef[R]", asked)

    def execute_async(
        self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> list[ray.ObjectRef[R]]:
        """Run a function on every worker; gives object references in rank order."""
        ranks = sorted(self._ranks)
        return [self.execute_single_async(rank, function, *args, **kwargs) for rank in ranks]

    def execute_single(
        self, rank: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a function on one worker and wait for its result."""
        return ray.get(self.execute_single_async(rank, function, *args, **kwargs))

    def execute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run a function on every worker and wait for all results, in rank order."""
        return list(ray.get(self.execute_async(function, *args, **kwargs)))


async def _shut_down_actor(member: ActorSlot) -> None:
    with contextlib.suppress(RayError):
        await member.actor.shut_down.remote()


async def _request_stack(member: ActorSlot) -> Stack | None:
    # In the control group, and not for long: a call that holds the interpreter answers nobody,
    # which is an answer too.
    asked = member.actor.capture_stack.options(concurrency_group="control").remote()
    try:
        return await asyncio.wait_for(await_reference(asked), STACK_SECONDS)
    except RayError:
        return None
    except TimeoutError:
        return await _detect_stopped_worker(member.info.result())


async def _detect_stopped_worker(worker: WorkerInfo) -> Stack | None:
    """Have another process of its node look whether a silent one is stopped."""
    node = NodeAffinitySchedulingStrategy(worker.node_id, soft=False)
    remote: Any = ray.remote  # its stub takes no options here
    look = remote(detect_stopped_process).options(
        num_cpus=0, max_retries=0, scheduling_strategy=node
    )
    with contextlib.suppress(RayError, TimeoutError):
        found: Stack | None = await asyncio.wait_for(
            await_reference(look.remote(worker.pid)), STOP_CHECK_S
        )
        return found
    return None


def _make_worker_died(error: RayError, node_id: str) -> Gone:
    """Describe a death; a worker whose node is gone or going was preempted."""
    # Ray says so of a node that was drained. One that has vanished counts as alive for a while.
    preempted = bool(getattr(error, "preempted", False)) or not is_node_available(node_id)
    return Gone(detail=str(error), time=time.time(), preempted=preempted)


def describe_worker_error(rank: int, error: RayTaskError) -> WorkerFailure:
    """Describe a worker whose own code failed outside the training function."""
    return WorkerFailure(
        rank=rank,
        kind="exception",
        type_name=type(error.cause).__name__,
        message=str(error.cause),
        traceback=str(error),  # Ray puts the remote one there
        time=time.time(),
    )
