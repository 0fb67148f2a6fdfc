"""Create, replace, and kill the worker actors of a run.

The pool manages slots, which are the bundles of its placement, and does not know about ranks. It
outlives attempts: after a failure, only dead or stuck processes are replaced, in their old slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drawbar._process.codec import RayValue
from drawbar._process.imported_modules import ModulesImported, WorkerFork
from drawbar._process.ranks import WorkerInfo
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._protocol.assignment import WORKER_INFO
from drawbar.train._worker.actor import Worker, take_fork_error
from drawbar.train._worker_group.capacity import has_room
from drawbar.train._worker_group.cluster import can_autoscale, list_node_resources
from drawbar.train._worker_group.placement import Placement, remove_orphaned_groups
from drawbar.train._worker_group.worker_group import OnMessages, OnWaiting

SETTLE_SECONDS = 2.0
MAX_SETTLE_SECONDS = 10.0
START_NOTICE_S = 5.0
FORK_SERVER_DELAY_S = 2.0
"""Time after the first report until the fork servers start, so that short runs do not need them."""

SPARE_DELAY_S = 5.0
"""Time after a start until the spare processes start, which would delay it otherwise."""


T = TypeVar("T")

_logger = logging.getLogger("drawbar.train")

_MAY_BE_STALE = (
    "The training function has changed %s, but did not do so in an earlier run. The workers of "
    "this run were forked from a process with the modules that the earlier run has imported. "
    "Modules that read these settings when they are imported may have the old values. To let all "
    "workers import for themselves, set RunConfig(forkserver_preload=[])."
)
T_co = TypeVar("T_co", covariant=True)


class RemoteMethod(Protocol[T_co]):
    """Method of a Ray actor."""

    def remote(self, *arguments: object) -> Awaitable[T_co]:
        """Call the method."""
        ...

    def options(self, **options: object) -> RemoteMethod[T_co]:
        """Return the method with call options."""
        ...


class RemoteStream(Protocol[T_co]):
    """Method of a Ray actor that is a streaming generator."""

    def remote(self, *arguments: object) -> AsyncIterator[Awaitable[T_co]]:
        """Call the method."""
        ...

    def options(self, **options: object) -> RemoteStream[T_co]:
        """Return the method with call options."""
        ...


class WorkerHandle(Protocol):
    """Handle of an actor that runs a `Worker`."""

    initialize: RemoteMethod[bytes]
    run: RemoteStream[RayValue]
    execute: RemoteMethod[object]
    handle_command: RemoteMethod[None]
    capture_stack: RemoteMethod[bytes]
    shut_down: RemoteMethod[None]


@dataclass
class ActorSlot:
    """Process of one slot.

    Attributes:
        actor: Handle of the actor.
        info: Node and process, as soon as the process is ready.
        run_task: Task that reads the process's messages during an attempt.
        on_messages: Callback to which these messages are passed.
        is_marked_dead: Whether the process died or cannot be used further.
        is_retired: Whether the process must not run another attempt.
    """

    actor: WorkerHandle
    info: asyncio.Future[WorkerInfo]
    run_task: asyncio.Future[None] | None = None
    on_messages: OnMessages | None = None
    is_marked_dead: bool = False
    is_retired: bool = False

    @property
    def worker(self) -> WorkerInfo | None:
        """Node and process; None if it is not ready, has failed to start, or was replaced."""
        has_failed = self.info.cancelled() or (self.info.done() and self.info.exception())
        return self.info.result() if self.info.done() and not has_failed else None

    @property
    def is_dead(self) -> bool:
        """True if the process is known to be dead or failed to start."""
        return self.is_marked_dead or (self.info.done() and self.worker is None)

    @property
    def is_running(self) -> bool:
        """True until the training function has ended."""
        return self.run_task is not None and not self.run_task.done()


class ActorPool:
    """One actor per slot.

    A pool of fixed size creates a placement group. An elastic pool does not: actors that do not fit
    stay pending, which costs nothing and shows the demand to an autoscaler. Both use
    `parent_placement` instead if it is not None.

    For in-place recovery, each node of the run has a spare: an idle process without reserved
    resources that takes the place of the next process that dies.

    Attributes:
        slots: Processes by slot.
        fork_error: Error after which processes are not forked, "" without one.
    """

    def __init__(
        self,
        scaling: ScalingConfig,
        run_path: str,
        runtime_env: Mapping[str, object] | None,
        process_setup: Callable[[], object] | None,
        parent_placement: Placement | None = None,
        fork_server: WorkerFork | None = None,
        *,
        keeps_spares: bool = False,
    ) -> None:
        self._scaling = scaling
        self._run_path = run_path
        remote: Any = ray.remote  # its stub does not know concurrency groups
        # A second thread for commands: `run` occupies the first one while the function runs.
        self._actor_class = remote(concurrency_groups={"control": 1})(Worker)
        self._runtime_env = dict(runtime_env) if runtime_env else None
        self._process_setup = process_setup
        self._parent_placement = parent_placement
        self._fork_server = fork_server
        self.fork_error = ""
        self._fork_server_starts: list[asyncio.Future[None]] = []
        self._placement: Placement | None = None
        self.slots: dict[int, ActorSlot] = {}
        self._keeps_spares = keeps_spares
        self._spares: dict[str, ActorSlot] = {}  # by node

    async def start(self, on_waiting: OnWaiting) -> list[ActorSlot]:
        """Create all missing processes at once and wait until enough of them are ready.

        Returns:
            The ready processes, by slot.

        Raises:
            Exception: A process failed to start.
        """
        if self._placement is None:
            self._placement = self._parent_placement or self._create_placement()
        # All at once: Ray starts processes in parallel, and each takes seconds.
        for slot in range(self._scaling.max_workers):
            if slot not in self.slots:
                self._create_actor(slot)
        started_at = time.monotonic()
        while not self._has_enough(is_settled=False):
            # Above the minimum, the start waits a little for each further worker. Otherwise an
            # elastic run would start small and restart at its first checkpoint. It waits longer if
            # processes start slowly: a node that has just joined starts its processes later.
            waiting = [slot.info for slot in self.slots.values() if not slot.info.done()]
            timeout = START_NOTICE_S
            if self._has_enough(is_settled=True):
                elapsed = time.monotonic() - started_at
                timeout = min(max(SETTLE_SECONDS, elapsed), MAX_SETTLE_SECONDS)
            ready, _ = await asyncio.wait(
                waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not ready and self._has_enough(is_settled=True):
                break
            if not ready:
                remove_orphaned_groups()
                on_waiting(len(self.list_ready()), self._is_placed())
        for actor_slot in self.list_ready():
            if error := actor_slot.info.result().fork_error:
                self._stop_forking(error)
        return self.list_ready()

    def use_modules(self, modules: ModulesImported) -> None:
        """Fork later processes from a server with the modules that the function has imported.

        The server of each node starts soon, or with the next process. Does nothing if
        `RunConfig.forkserver_preload` is set, or if forks are not possible.
        """
        spec = self._fork_server
        if spec is None or spec.key is None:
            return
        learned, changed = spec.learned, ", ".join(modules.changed_settings)
        if learned is not None and bool(learned.changed_settings) != bool(changed):
            if learned.by_function:
                _logger.warning(_MAY_BE_STALE, changed)
                self._stop_forking(f"the training function changes {changed}", modules)
            return
        if set(modules.names) <= set(spec.modules):
            return
        self._fork_server = spec.learn(modules)
        nodes = {slot.worker.node_id for slot in self.list_ready() if slot.worker}
        self._fork_server_starts = [
            asyncio.ensure_future(self._start_fork_server(node)) for node in nodes
        ]

    async def _start_fork_server(self, node: str) -> None:
        await asyncio.sleep(FORK_SERVER_DELAY_S)
        remote: Any = ray.remote  # its stub takes no options here
        task = remote(take_fork_error).options(
            num_cpus=0,
            max_retries=0,
            runtime_env=self._make_runtime_env(),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        with contextlib.suppress(RayError):  # the node is lost
            if error := await await_reference(task.remote()):
                self._stop_forking(error)
        if spare := self._spares.pop(node, None):  # without these modules
            _kill(spare)
            self._start_spares()

    def _stop_forking(self, error: str, modules: ModulesImported | None = None) -> None:
        """Start later processes without the fork server, and do not wait for it again."""
        if self._fork_server is not None and self._fork_server.key is not None:
            changed = () if modules is None else modules.changed_settings
            self._fork_server.learn(
                ModulesImported(names=(), sys_path=(), changed_settings=changed)
            )
        self._fork_server, self.fork_error = None, error

    def start_spares(self) -> None:
        """Start the missing spares soon, if the pool keeps any."""
        if self._keeps_spares:
            asyncio.get_running_loop().call_later(SPARE_DELAY_S, self._start_spares)

    def _start_spares(self) -> None:
        for node in {slot.worker.node_id for slot in self.slots.values() if slot.worker}:
            if node not in self._spares or self._spares[node].is_dead:
                spare = self._spares[node] = self._start_actor(_share_node(node))
                # Otherwise asyncio would log the exception of a spare that nobody uses.
                spare.info.add_done_callback(lambda info: info.cancelled() or info.exception())

    def list_ready(self) -> list[ActorSlot]:
        """Return the processes that are ready or have failed to start, by slot."""
        slots = (self.slots[index] for index in sorted(self.slots))
        return [slot for slot in slots if slot.info.done()]

    def _has_enough(self, *, is_settled: bool) -> bool:
        """Return whether an attempt can start.

        Args:
            is_settled: Whether no further process has become ready for a while.
        """
        required = self._scaling.min_workers if is_settled else self._scaling.max_workers
        for slot in self.list_ready():
            slot.info.result()  # raises the error of a process that failed to start
        return len(self.list_ready()) >= required

    def _is_placed(self) -> bool:
        return self._placement is not None and self._placement.is_ready

    def _create_placement(self) -> Placement | None:
        return None if self._scaling.elasticity_enabled else Placement.create(self._scaling)

    def _create_actor(self, slot: int, shared_node: str = "") -> None:
        # Ray rejects CPU, GPU, and memory among the other resources.
        resources = self._scaling.bundle
        options: dict[str, object] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            # Ray's own restart would create a process that no attempt knows.
            "max_restarts": 0,
            # Without a strategy, Ray may use the placement group of the calling process, which may
            # be full.
            "scheduling_strategy": "DEFAULT",
        }
        if shared_node:
            options = _share_node(shared_node)
        elif self._placement is not None:
            options["scheduling_strategy"] = self._placement.get_scheduling_strategy(slot)
        elif self._scaling.label_selectors:
            options["label_selector"] = self._scaling.label_selectors[slot]
        self.slots[slot] = self._start_actor(options)

    def _start_actor(self, options: dict[str, object]) -> ActorSlot:
        if runtime_env := self._make_runtime_env():
            options["runtime_env"] = runtime_env
        actor = self._actor_class.options(**options).remote(self._run_path)
        # Called before the actor is ready: Ray queues the call, and its result shows readiness.
        reference = actor.initialize.remote(self._process_setup)
        return ActorSlot(actor, asyncio.ensure_future(_receive_worker_info(reference)))

    def _make_runtime_env(self) -> dict[str, object]:
        runtime_env = dict(self._runtime_env or {})
        if self._fork_server is not None and self._fork_server.modules:
            runtime_env["py_executable"] = self._fork_server.make_command()
        return runtime_env

    def kill_slots(self, slots: Iterable[int], *, should_replace: bool) -> None:
        """Kill the processes in some slots and optionally start new ones there."""
        for slot in slots:
            _kill(self.slots.pop(slot))
            if should_replace:
                self._create_actor(slot)

    def exclude_node(self, node_id: str, used: Mapping[str, int]) -> bool:
        """Create no process on a node after `kill_all`.

        Args:
            node_id: ID of the node.
            used: Number of workers of the run on each node, by ID.

        Returns:
            False if the other nodes have no room, or if the placement group belongs to another
            owner.
        """
        scaling = self._scaling.exclude_node(node_id)
        is_possible = scaling.label_selectors != self._scaling.label_selectors
        if self._parent_placement is not None or not is_possible:
            return False
        if not can_autoscale() and not has_room(list_node_resources(), scaling, used):
            return False
        self._scaling = scaling
        return True

    def replace(self, dead: ActorSlot, shared_node: str = "") -> ActorSlot:
        """Use the spare of the node or a new process in the slot of a dead one.

        Args:
            dead: The process to replace.
            shared_node: Node on which the process starts without reserved resources, for this
                attempt only. Default: with the resources of the slot.
        """
        index = next(index for index, slot in self.slots.items() if slot is dead)
        node = shared_node or (dead.worker.node_id if dead.worker else "")
        spare = self._spares.pop(node, None)
        _kill(self.slots.pop(index))
        if spare is not None and not spare.is_dead:
            self.slots[index] = spare
        else:
            self._create_actor(index, shared_node)
        self.slots[index].is_retired = bool(shared_node) or spare is self.slots[index]
        self.start_spares()
        return self.slots[index]

    def kill_all(self) -> None:
        """Kill all processes and release the placement."""
        for start in self._fork_server_starts:
            start.cancel()
        for slot in [*self.slots.values(), *self._spares.values()]:
            _kill(slot)
        self.slots.clear()
        self._spares.clear()
        if self._placement is not None:
            # Last: Ray kills the actors in a removed group, which would be reported as deaths.
            self._placement.release()
            self._placement = None


def _share_node(node: str) -> dict[str, object]:
    """Return the options of an actor that runs on a node without reserved resources."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": strategy}


def _kill(slot: ActorSlot) -> None:
    # Cancelled before the kill, so that they do not report an intended death.
    for task in (slot.info, slot.run_task):
        if task is not None:
            task.cancel()
    ray.kill(slot.actor)  # type: ignore[arg-type]  # it is a Ray actor handle


async def _receive_worker_info(reference: Awaitable[bytes]) -> WorkerInfo:
    return WORKER_INFO.decode(await reference)


async def await_reference(reference: Awaitable[T]) -> T:
    """Await an object reference, which is not a coroutine."""
    return await reference
