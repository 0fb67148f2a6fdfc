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
from typing import Any, Protocol

import cloudpickle
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from drawbar.train._config import ScalingConfig
from drawbar.train._failure import describe_broken_worker
from drawbar.train._messages import Failed, Gone, Interrupt, Message, Order, Ranks, WorkerInfo
from drawbar.train._session import Assignment
from drawbar.train._worker import Worker
from drawbar.train.backend import WorkerGroupView

LEAVE_SECONDS = 2.0
NOTICE_SECONDS = 5.0


Hear = Callable[[int, Sequence[Message]], None]


class WorkerGroup(WorkerGroupView, Protocol):
    """What the controller needs of a group of workers."""

    async def start(self, on_wait: Callable[[], None]) -> list[WorkerInfo]:
        """Bring up every slot that has no living worker; gives where all of them are, by slot."""
        ...

    def take_ranks(self, ranks: Sequence[Ranks]) -> None:
        """Learn the rank of each slot; from now on workers are spoken of by rank."""
        ...

    def run(self, assignments: Sequence[Assignment], hear: Hear) -> None:
        """Begin an attempt; `assignments` are by slot.

        `hear(rank, messages)` is called on the event loop, in each rank's order. A process that
        dies says `Gone`.
        """
        ...

    def order(self, rank: int, order: Order) -> None:
        """Give one rank an order, without waiting."""
        ...

    async def end_attempt(self, *, grace: float, keep: bool, replace: bool) -> None:
        """Interrupt what still runs. Kept processes can run another attempt, others are killed.

        `replace` starts the replacements of the dead at once, while the others are still stopping.
        """
        ...

    async def stop(self) -> None:
        """End every process, in an orderly way where it is idle, and give the resources back."""
        ...

    def kill(self) -> None:
        """End every process at once."""
        ...


class RayWorkerGroup:
    """Workers as Ray actors."""

    def __init__(
        self,
        scaling: ScalingConfig,
        run_path: str,
        payload: bytes,
        runtime_env: Mapping[str, Any] | None,
    ) -> None:
        self._scaling = scaling
        self._run_path = run_path
        self._payload = ray.put(payload)
        remote: Any = ray.remote  # its stub does not know concurrency groups
        self._actor_class = remote(concurrency_groups={"control": 1})(Worker)
        self._runtime_env = dict(runtime_env) if runtime_env else None
        self._placement: PlacementGroup | None = None
        self._actors: dict[int, Any] = {}
        self._infos: dict[int, WorkerInfo] = {}
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._slot_of: dict[int, int] = {}
        self._attempt = -1

    def __len__(self) -> int:
        return self._scaling.num_workers

    # -- processes

    async def start(self, on_wait: Callable[[], None]) -> list[WorkerInfo]:
        """Create what is missing, all at once, and wait until every process says where it is."""
        if self._placement is None:
            self._placement = self._make_placement_group()
        for slot in range(len(self)):
            if slot not in self._actors:
                self._create(slot)
        unknown = [slot for slot in self._actors if slot not in self._infos]
        asked = asyncio.gather(*[_ask(self._actors[slot].describe.remote()) for slot in unknown])
        while not (await asyncio.wait([asked], timeout=NOTICE_SECONDS))[0]:
            on_wait()
        self._infos.update(zip(unknown, asked.result(), strict=True))
        return [self._infos[slot] for slot in range(len(self))]

    def _make_placement_group(self) -> PlacementGroup:
        selector = self._scaling.label_selector
        labels = [selector] * len(self) if isinstance(selector, Mapping) else selector
        made: PlacementGroup = placement_group(
            [self._scaling.bundle or {"CPU": 0.001}] * len(self),
            strategy=self._scaling.placement_strategy,
            bundle_label_selector=[dict(each) for each in labels] if labels else None,
        )
        return made

    def _create(self, slot: int) -> None:
        assert self._placement is not None  # start() makes it first
        resources = self._scaling.bundle
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placement, slot),
        }
        if self._runtime_env:
            options["runtime_env"] = self._runtime_env
        self._actors[slot] = self._actor_class.options(**options).remote(self._run_path)

    def _forget(self, slot: int) -> None:
        actor = self._actors.pop(slot, None)
        self._infos.pop(slot, None)
        if actor is not None:
            ray.kill(actor)

    # -- one attempt

    def take_ranks(self, ranks: Sequence[Ranks]) -> None:
        """Learn the rank of each slot."""
        self._slot_of = {each.world_rank: slot for slot, each in enumerate(ranks)}

    def run(self, assignments: Sequence[Assignment], hear: Hear) -> None:
        """Begin an attempt: one call per worker, whose stream is read from now on."""
        self._attempt = assignments[0].attempt
        for slot, assignment in enumerate(assignments):
            run = self._actors[slot].run.options(num_returns="streaming")
            stream = run.remote(assignment, self._payload)
            self._streams[slot] = asyncio.create_task(
                self._listen(assignment.ranks.world_rank, slot, stream, hear)
            )

    async def _listen(self, rank: int, slot: int, stream: Any, hear: Hear) -> None:
        try:
            async for reference in stream:
                hear(rank, await reference)
        except RayTaskError as error:
            self._infos.pop(slot, None)
            hear(rank, [Failed(failure=describe_broken_worker(rank, error))])
        except RayError as error:
            self._infos.pop(slot, None)
            hear(rank, [_gone(error)])

    def order(self, rank: int, order: Order) -> None:
        """Give one rank an order; if its process is dead, its stream tells."""
        actor = self._actors.get(self._slot_of[rank])
        if actor is not None:
            actor.obey.options(concurrency_group="control").remote(self._attempt, order)

    async def end_attempt(self, *, grace: float, keep: bool, replace: bool) -> None:
        """Interrupt every running function; kill whoever has not stopped in `grace` seconds."""
        self._discard([slot for slot in self._actors if slot not in self._infos], replace)
        running = {slot: task for slot, task in self._streams.items() if not task.done()}
        for rank, slot in self._slot_of.items():
            if slot in running:
                self.order(rank, Interrupt(reason="the attempt is over"))
        if running:
            await asyncio.wait(running.values(), timeout=grace)
        stuck = [slot for slot, task in running.items() if not task.done()]
        died = [slot for slot in self._actors if slot not in self._infos]
        self._discard({*stuck, *died} if keep else list(self._infos), replace)
        self._streams = {}

    def _discard(self, slots: Iterable[int], replace: bool) -> None:
        for slot in slots:
            task = self._streams.get(slot)
            if task is not None:
                task.cancel()
            self._forget(slot)
            if replace:
                self._create(slot)

    # -- the end

    async def stop(self) -> None:
        """Let idle processes run their exit handlers, kill the rest, remove the placement group."""
        idle = [slot for slot in self._infos if self._is_idle(slot)]
        leaving = [asyncio.ensure_future(_leave(self._actors[slot])) for slot in idle]
        if leaving:
            await asyncio.wait(leaving, timeout=LEAVE_SECONDS)
        self.kill()

    def _is_idle(self, slot: int) -> bool:
        return slot not in self._streams or self._streams[slot].done()

    def kill(self) -> None:
        """Kill every process and remove the placement group."""
        for slot in list(self._actors):
            self._forget(slot)
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    # -- the view that backends get

    def execute_single_async(
        self, rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a function on one worker; gives an object reference."""
        call = cloudpickle.dumps((function, args, kwargs))
        return self._actors[self._slot_of[rank]].execute.remote(call)

    def execute_async(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function on every worker; gives object references in rank order."""
        ranks = sorted(self._slot_of)
        return [self.execute_single_async(rank, function, *args, **kwargs) for rank in ranks]

    def execute_single(
        self, rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a function on one worker and wait for its result."""
        return ray.get(self.execute_single_async(rank, function, *args, **kwargs))

    def execute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function on every worker and wait for all results, in rank order."""
        return list(ray.get(self.execute_async(function, *args, **kwargs)))


async def _ask(reference: Any) -> Any:
    return await reference


async def _leave(actor: Any) -> None:
    with contextlib.suppress(RayActorError):
        await actor.leave.remote()


def _gone(error: RayError) -> Gone:
    preempted = isinstance(error, ActorDiedError) and bool(getattr(error, "preempted", False))
    return Gone(detail=str(error), time=time.time(), preempted=preempted)
