"""The processes of a run on Ray: placed, started, replaced, killed.

The pool knows slots, which are the places of its placement, and nothing of ranks. It
outlives attempts: after a failure only dead or stuck processes are replaced, into their old slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import ray

from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._messages import Message, WorkerInfo
from drawbar.train._worker.actor import Worker
from drawbar.train._worker.stack import Stack
from drawbar.train._worker_group.placement import Placement, remove_orphaned_groups
from drawbar.train._worker_group.worker_group import OnMessages, OnWaiting

SETTLE_SECONDS = 2.0
START_NOTICE_S = 5.0


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class RemoteMethod(Protocol[T_co]):
    """A method of an actor, as Ray gives it."""

    def remote(self, *arguments: object) -> Awaitable[T_co]:
        """Call it."""
        ...

    def options(self, **options: object) -> RemoteMethod[T_co]:
        """Give it so that it is called with these options."""
        ...


class RemoteStream(Protocol[T_co]):
    """A method of an actor that is a streaming generator, as Ray gives it."""

    def remote(self, *arguments: object) -> AsyncIterator[Awaitable[T_co]]:
        """Call it."""
        ...

    def options(self, **options: object) -> RemoteStream[T_co]:
        """Give it so that it is called with these options."""
        ...


class WorkerHandle(Protocol):
    """A `Worker` in a process of its own."""

    initialize: RemoteMethod[WorkerInfo]
    run: RemoteStream[list[Message]]
    execute: RemoteMethod[object]
    obey: RemoteMethod[None]
    capture_stack: RemoteMethod[Stack]
    shut_down: RemoteMethod[None]


@dataclass
class ActorSlot:
    """One slot's process. `up` gives where it is; `stream` is there during an attempt."""

    actor: WorkerHandle
    info: asyncio.Future[WorkerInfo]
    run_task: asyncio.Future[None] | None = None
    on_messages: OnMessages | None = None
    is_marked_dead: bool = False
    is_retired: bool = False

    @property
    def is_dead(self) -> bool:
        """Whether the process is known to be gone, or has not come up."""
        return self.is_marked_dead or (self.info.done() and self.info.exception() is not None)

    @property
    def is_running(self) -> bool:
        """Whether its function has not ended."""
        return self.run_task is not None and not self.run_task.done()


class ActorPool:
    """One actor per slot.

    A pool of fixed size has one placement. An elastic one has none of its own: the actors that do
    not fit stay pending, which costs nothing and tells an autoscaler what is missing. Both stay in
    the group `around` the process that hosts the run, if there is one with room.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        run_path: str,
        runtime_env: Mapping[str, object] | None,
        process_setup: Callable[[], object] | None,
        parent_placement: Placement | None = None,
    ) -> None:
        self._scaling = scaling
        self._run_path = run_path
        remote: Any = ray.remote  # its stub does not know concurrency groups
        # A second thread for orders: `run` holds the first one as long as the function runs.
        self._actor_class = remote(concurrency_groups={"control": 1})(Worker)
        self._runtime_env = dict(runtime_env) if runtime_env else None
        self._process_setup = process_setup
        self._around = parent_placement
        self._placement: Placement | None = None
        self.slots: dict[int, ActorSlot] = {}

    async def start(self, on_wait: OnWaiting) -> list[WorkerInfo]:
        """Create what is missing, all at once, and wait until enough processes are up.

        Raises:
            Exception: Whatever keeps one of them from starting.
        """
        if self._placement is None:
            self._placement = self._around or self._create_placement()
        # All at once: Ray starts processes side by side, and each takes seconds.
        for slot in range(self._scaling.max_workers):
            if slot not in self.slots:
                self._create_actor(slot)
        while not self._has_enough(is_settled=False):
            # With as many as are wanted at the least, the start still waits a little for each
            # further one: otherwise an elastic run would begin small and restart at its first
            # checkpoint.
            waiting = [each.info for each in self.slots.values() if not each.info.done()]
            timeout = SETTLE_SECONDS if self._has_enough(is_settled=True) else START_NOTICE_S
            arrived, _ = await asyncio.wait(
                waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not arrived and self._has_enough(is_settled=True):
                break
            if not arrived:
                remove_orphaned_groups()
                on_wait(len(self.list_ready()), self._is_placed())
        return [member.info.result() for member in self.list_ready()]

    def list_ready(self) -> list[ActorSlot]:
        """Give the processes that are up, or have failed to be, by slot."""
        members = (self.slots[slot] for slot in sorted(self.slots))
        return [member for member in members if member.info.done()]

    def _has_enough(self, *, is_settled: bool) -> bool:
        """Whether an attempt can start; `settled`: nobody else has come for a while."""
        wanted = self._scaling.min_workers if is_settled else self._scaling.max_workers
        for member in self.list_ready():
            member.info.result()  # raises what kept the process from starting
        return len(self.list_ready()) >= wanted

    def _is_placed(self) -> bool:
        return self._placement is not None and self._placement.is_ready

    def _create_placement(self) -> Placement | None:
        return None if self._scaling.elasticity_enabled else Placement.create(self._scaling)

    def _create_actor(self, slot: int) -> None:
        # Ray refuses CPU, GPU and memory among the other resources.
        resources = self._scaling.bundle
        options: dict[str, object] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            # Ray's own restart would give a process that no attempt knows.
            "max_restarts": 0,
            "scheduling_strategy": "DEFAULT",  # not in a group around that has no room
        }
        if self._placement is not None:
            options["scheduling_strategy"] = self._placement.get_scheduling_strategy(slot)
        elif self._scaling.label_selectors:
            options["label_selector"] = self._scaling.label_selectors[slot]
        if self._runtime_env:
            options["runtime_env"] = self._runtime_env
        actor = self._actor_class.options(**options).remote(self._run_path)
        # Called before it is up: Ray sends the call along, and the answer says that it is.
        up = asyncio.ensure_future(await_reference(actor.initialize.remote(self._process_setup)))
        self.slots[slot] = ActorSlot(actor, up)

    def _kill_actor(self, slot: int) -> None:
        member = self.slots.pop(slot)
        # Before the kill, or they would tell of a death that is wanted.
        for task in (member.info, member.run_task):
            if task is not None:
                task.cancel()
        ray.kill(member.actor)  # type: ignore[arg-type]  # it is a handle of Ray's

    def kill_slots(self, slots: Iterable[int], *, should_replace: bool) -> None:
        """Kill the processes of some slots, and perhaps start others there."""
        for slot in slots:
            self._kill_actor(slot)
            if should_replace:
                self._create_actor(slot)

    def kill_all(self) -> None:
        """Kill every process and give up their placement."""
        for slot in list(self.slots):
            self._kill_actor(slot)
        if self._placement is not None:
            # Last: Ray kills who lies in a group that is removed, and would tell of deaths.
            self._placement.release()
            self._placement = None


async def await_reference(reference: Awaitable[T]) -> T:
    """Await an object reference, which is no coroutine."""
    return await reference
