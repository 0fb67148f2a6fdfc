"""The workers of a run: one placement group, N actors, and one stream of what they say.

The group knows slots (bundles of the placement group) and processes; ranks are given from outside
with each attempt. A group outlives attempts: after a failure only dead or stuck workers are
replaced, into their old bundles.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from drawbar.train._carry import Carried, carry
from drawbar.train._errors import WorkerFailure
from drawbar.train._group.cluster import node_is_safe
from drawbar.train._group.worker_group import Hear, OnWait
from drawbar.train._messages import (
    Assignment,
    Failed,
    Gone,
    Interrupt,
    Order,
    Ranks,
    Retired,
    WorkerInfo,
)
from drawbar.train._settings.scaling_config import ScalingConfig
from drawbar.train._worker.actor import Worker
from drawbar.train._worker.stack import Stack

LEAVE_SECONDS = 2.0
SETTLE_SECONDS = 2.0
STACK_SECONDS = 2.0
NOTICE_SECONDS = 5.0


class RayWorkerGroup:
    """Workers as Ray actors.

    A group of fixed size has one placement group, which outlives attempts. An elastic one has none:
    the actors that do not fit stay pending, which costs nothing and tells an autoscaler what is
    missing; one that starts is `spare`, and takes part from the next attempt on.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        run_path: str,
        payload: ray.ObjectRef[Carried],
        runtime_env: Mapping[str, Any] | None,
        process_setup: Callable[[], object] | None,
    ) -> None:
        self._scaling = scaling
        self._run_path = run_path
        self._payload = [payload]  # until stop(); Ray does not follow a reference in a list
        remote: Any = ray.remote  # its stub does not know concurrency groups
        self._actor_class = remote(concurrency_groups={"control": 1})(Worker)
        self._runtime_env = dict(runtime_env) if runtime_env else None
        self._process_setup = process_setup
        self._placement: PlacementGroup | None = None
        self._members: dict[int, _Member] = {}
        self._ranks: dict[int, _Member] = {}
        self._attempt = -1
        self._orders: set[asyncio.Future[None]] = set()  # not taken yet

    def __len__(self) -> int:
        return len(self._ranks)

    # -- processes

    async def start(self, on_wait: OnWait) -> list[WorkerInfo]:
        """Create what is missing, all at once, and wait until enough processes are up."""
        if self._placement is None and not self._scaling.elasticity_enabled:
            self._placement = self._make_placement_group()
        for slot in range(self._scaling.max_workers):
            if slot not in self._members:
                self._create(slot)
        while not self._enough(settled=False):
            waiting = [each.up for each in self._members.values() if not each.up.done()]
            timeout = SETTLE_SECONDS if self._enough(settled=True) else NOTICE_SECONDS
            arrived, _ = await asyncio.wait(
                waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not arrived and self._enough(settled=True):
                break
            if not arrived:
                on_wait(len(self._up()), self._is_placed())
        return [member.up.result() for member in self._up()]

    @property
    def spare(self) -> int:
        """Processes that came up too late for the attempt."""
        return sum(member.stream is None for member in self._up())

    def _up(self) -> list[_Member]:
        members = (self._members[slot] for slot in sorted(self._members))
        return [member for member in members if member.up.done()]

    def _enough(self, *, settled: bool) -> bool:
        """Whether an attempt can start; `settled`: nobody else has come for a while."""
        wanted = self._scaling.min_workers if settled else self._scaling.max_workers
        for member in self._up():
            member.up.result()  # raises what kept the process from starting
        return len(self._up()) >= wanted

    def _is_placed(self) -> bool:
        if self._placement is None:
            return False
        table: dict[str, Any] = placement_group_table(self._placement)
        return bool(table["state"] == "CREATED")

    def _make_placement_group(self) -> PlacementGroup:
        count = self._scaling.max_workers
        labels = self._scaling.selectors
        made: PlacementGroup = placement_group(
            [self._scaling.bundle or {"CPU": 0.001}] * count,
            strategy=self._scaling.placement_strategy,
            bundle_label_selector=labels or None,
        )
        return made

    def _create(self, slot: int) -> None:
        resources = self._scaling.bundle
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "max_restarts": 0,
        }
        if self._placement is not None:
            strategy = PlacementGroupSchedulingStrategy(self._placement, slot)
            options["scheduling_strategy"] = strategy
        elif self._scaling.selectors:
            options["label_selector"] = self._scaling.selectors[slot]
        if self._runtime_env:
            options["runtime_env"] = self._runtime_env
        actor = self._actor_class.options(**options).remote(self._run_path)
        up = asyncio.ensure_future(_await(actor.set_up.remote(self._process_setup)))
        self._members[slot] = _Member(actor, up)

    def _forget(self, slot: int) -> None:
        member = self._members.pop(slot)
        for task in (member.up, member.stream):
            if task is not None:
                task.cancel()
        ray.kill(member.actor)

    # -- one attempt

    def take_ranks(self, ranks: Sequence[Ranks]) -> None:
        """Learn the rank of each worker that `start` gave."""
        pairs = zip(ranks, self._up(), strict=False)
        self._ranks = {each.world_rank: member for each, member in pairs}

    def run(self, assignments: Sequence[Assignment], hear: Hear) -> None:
        """Begin an attempt: one call per worker, whose stream is read from now on."""
        self._attempt = assignments[0].attempt
        for assignment in assignments:
            rank = assignment.ranks.world_rank
            member = self._ranks[rank]
            run = member.actor.run.options(num_returns="streaming")
            stream = run.remote(assignment, self._payload)
            member.hear = hear
            member.stream = asyncio.ensure_future(self._listen(rank, member, stream, hear))

    async def _listen(self, rank: int, member: _Member, stream: Any, hear: Hear) -> None:
        try:
            async for reference in stream:
                messages = await reference
                member.retired |= any(isinstance(each, Retired) for each in messages)
                hear(rank, messages)
        except RayTaskError as error:
            member.dead = True
            hear(rank, [Failed(failure=describe_broken_worker(rank, error))])
        except RayError as error:
            member.dead = True
            hear(rank, [await asyncio.to_thread(_gone, error, member.up.result().node_id)])

    def order(self, rank: int, order: Order) -> None:
        """Give one rank an order; one that it cannot take fails it.

        If its process is dead, its stream tells.
        """
        member = self._ranks[rank]
        control = member.actor.obey.options(concurrency_group="control")
        taken = asyncio.ensure_future(_await(control.remote(self._attempt, order)))
        self._orders.add(taken)
        taken.add_done_callback(partial(self._note_taken, rank, member))

    def _note_taken(self, rank: int, member: _Member, taken: asyncio.Future[None]) -> None:
        self._orders.discard(taken)
        error = None if taken.cancelled() else taken.exception()
        if isinstance(error, RayTaskError) and member.hear is not None:
            member.dead = True
            member.hear(rank, [Failed(failure=describe_broken_worker(rank, error))])

    async def stacks(self) -> dict[int, Stack | None]:
        """Ask every rank where its threads stand; None for one that does not answer."""
        answers = await asyncio.gather(*[_stack_of(member) for member in self._ranks.values()])
        return dict(zip(self._ranks, answers, strict=True))

    async def end_attempt(self, *, grace: float, keep: bool, replace: bool) -> None:
        """Interrupt every running function; kill whoever has not stopped in `grace` seconds."""
        taking_part = [slot for slot, member in self._members.items() if member.stream is not None]
        dead = [slot for slot, member in self._members.items() if member.is_dead]
        self._discard(dead, replace)
        running = {rank: each.stream for rank, each in self._ranks.items() if each.is_running}
        for rank in running:
            self.order(rank, Interrupt(reason="the attempt is over"))
        if running:
            await asyncio.wait([task for task in running.values() if task], timeout=grace)
        still_there = self._members.keys()  # none of them, if kill() was called meanwhile
        for slot in (set(taking_part) - set(dead)) & still_there:
            member = self._members[slot]
            if member.is_dead or member.is_running or member.retired or not keep:
                self._discard([slot], replace)
            member.stream = None

    def _discard(self, slots: Iterable[int], replace: bool) -> None:
        for slot in slots:
            self._forget(slot)
            if replace:
                self._create(slot)

    def move(self) -> None:
        """Give up every process and the placement group: the next start places all of them anew."""
        self.kill()

    # -- the end

    async def stop(self) -> None:
        """Let idle processes run their exit handlers, kill all, remove the placement group.

        A kill ends a process within some ten milliseconds; its own end would take it seconds.
        """
        leaving = [
            asyncio.ensure_future(_leave(member))
            for member in self._members.values()
            if member.up.done() and not member.is_dead
        ]
        if leaving:
            await asyncio.wait(leaving, timeout=LEAVE_SECONDS)
        self.kill()
        self._payload.clear()

    def kill(self) -> None:
        """Kill every process and remove the placement group."""
        for slot in list(self._members):
            self._forget(slot)
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    # -- the view that backends get

    def execute_single_async(
        self, rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a function on one worker; gives an object reference."""
        return self._ranks[rank].actor.execute.remote(carry((function, args, kwargs)))

    def execute_async(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function on every worker; gives object references in rank order."""
        ranks = sorted(self._ranks)
        return [self.execute_single_async(rank, function, *args, **kwargs) for rank in ranks]

    def execute_single(
        self, rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a function on one worker and wait for its result."""
        return ray.get(self.execute_single_async(rank, function, *args, **kwargs))

    def execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function on every worker and wait for all results, in rank order."""
        return list(ray.get(self.execute_async(function, *args, **kwargs)))


@dataclass
class _Member:
    """One slot's process. `up` gives where it is; `stream` is there during an attempt."""

    actor: Any
    up: asyncio.Future[WorkerInfo]
    stream: asyncio.Future[None] | None = None
    hear: Hear | None = None
    dead: bool = False
    retired: bool = False

    @property
    def is_dead(self) -> bool:
        return self.dead or (self.up.done() and self.up.exception() is not None)

    @property
    def is_running(self) -> bool:
        return self.stream is not None and not self.stream.done()


async def _await(reference: Any) -> Any:
    return await reference


async def _leave(member: _Member) -> None:
    with contextlib.suppress(RayError):
        await member.actor.leave.remote()


async def _stack_of(member: _Member) -> Stack | None:
    asked = member.actor.stack.options(concurrency_group="control").remote()
    with contextlib.suppress(RayError, TimeoutError):
        stack: Stack = await asyncio.wait_for(_await(asked), STACK_SECONDS)
        return stack
    return None


def _gone(error: RayError, node_id: str) -> Gone:
    """Describe a death; a worker whose node is gone or going was preempted."""
    preempted = bool(getattr(error, "preempted", False)) or not node_is_safe(node_id)
    return Gone(detail=str(error), time=time.time(), preempted=preempted)


def describe_broken_worker(rank: int, error: RayTaskError) -> WorkerFailure:
    """Describe a worker whose own code failed outside the training function."""
    return WorkerFailure(
        rank=rank,
        kind="exception",
        type_name=type(error.cause).__name__,
        message=str(error.cause),
        traceback=str(error),  # Ray puts the remote one there
        time=time.time(),
    )
