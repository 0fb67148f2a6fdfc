"""Worker group of Ray actors.

Each rank has one actor call and one stream of messages. The processes come from an `ActorPool`;
each attempt assigns ranks to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drawbar._base.ray_compat import suppress_death_messages
from drawbar._process.codec import ProtocolError, RayValue
from drawbar._process.imported_modules import ModulesImported
from drawbar._process.rank_assignment import assign_ranks, rank_workers
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.serialization import MIN_SHARED_BYTES, Serialized, serialize
from drawbar._process.stack import STACK, Stack, detect_stopped_process
from drawbar._process.threads import run_in_daemon_thread
from drawbar._process.worker_failure import WorkerFailure
from drawbar._recovery.startup_errors import is_node_loss
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.commands import COMMANDS, CollectiveResult, Command
from drawbar.train._protocol.messages import MESSAGE_BATCHES, ProcessRetired, RankFailed, WorkerDied
from drawbar.train._worker_group.actor_pool import ActorPool, ActorSlot, await_reference
from drawbar.train._worker_group.cluster import is_node_available
from drawbar.train._worker_group.worker_group import (
    AttemptEnd,
    OnMessages,
    OnWaiting,
    Replacement,
)

P = ParamSpec("P")
R = TypeVar("R")

StartStores = Callable[[Sequence[str]], Mapping[str, object]]

SHUTDOWN_S = 2.0
STACK_SECONDS = 2.0
RESERVED_START_S = 20.0
"""Time that a new process has to start with reserved resources, before it shares a node."""

STOP_CHECK_S = 5.0  # Ray may have to start a process for the check


class RayWorkerGroup:
    """Workers as Ray actors.

    Args:
        pool: Processes of the workers.
        train_loop: Training function that every rank runs.
        start_stores: Starts the memory stores on the nodes of an attempt; receives the ID of the
            node of each rank, and returns references for the ranks by node.
    """

    def __init__(
        self,
        pool: ActorPool,
        train_loop: ray.ObjectRef[Serialized],
        start_stores: StartStores | None = None,
    ) -> None:
        self._pool = pool
        self._start_stores = start_stores
        self._memory_stores: Mapping[str, object] = {}
        self._train_loop = [train_loop]  # until stop(); Ray does not track references in lists
        self._ranks: dict[int, ActorSlot] = {}
        self._attempt = -1
        self._undelivered_commands: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._ranks)

    # -- processes

    async def start(self, on_waiting: OnWaiting) -> list[tuple[WorkerInfo, Ranks]]:
        """Create all missing processes at once and wait until enough of them are ready."""
        slots = await self._pool.start(on_waiting)
        workers = [slot.info.result() for slot in slots]
        workers[0] = msgspec.structs.replace(workers[0], fork_error=self._pool.fork_error)
        suppress_death_messages((worker.node_id, worker.pid) for worker in workers)
        ranks_by_slot = assign_ranks(workers)
        self._ranks = {
            ranks.world_rank: slot for slot, ranks in zip(slots, ranks_by_slot, strict=True)
        }
        ranked = rank_workers(workers)
        if self._start_stores is not None:
            self._memory_stores = self._start_stores([worker.node_id for worker, _ in ranked])
        return ranked

    @property
    def num_idle_workers(self) -> int:
        """Number of processes that became ready too late for the attempt."""
        return sum(slot.run_task is None for slot in self._pool.list_ready())

    # -- one attempt

    def run(self, assignments: Sequence[WorkerAssignment], on_messages: OnMessages) -> None:
        """Start an attempt: one call per worker, whose stream is read from now on."""
        self._attempt = assignments[0].attempt
        for assignment in assignments:
            slot = self._ranks[assignment.ranks.world_rank]
            stream = self._call_run(slot, assignment)
            slot.on_messages = on_messages
            slot.run_task = asyncio.ensure_future(
                self._receive_messages(assignment.ranks.world_rank, slot, stream, on_messages)
            )
        self._pool.start_spares()

    def _call_run(
        self, slot: ActorSlot, assignment: WorkerAssignment
    ) -> AsyncIterator[Awaitable[RayValue]]:
        # A stream instead of calls of the driver: messages keep their order, and the end of the
        # stream reports the death of the process.
        run = slot.actor.run.options(num_returns="streaming")
        stores = self._memory_stores.get(slot.info.result().node_id)
        assignment = dataclasses.replace(assignment, memory_stores=stores)
        if assignment.open_shards is not None:
            # Ray would unpickle it before the worker has the environment of the driver.
            shards = serialize(assignment.open_shards)
            assignment = dataclasses.replace(assignment, open_shards=shards)
        return run.remote(assignment, self._train_loop)

    def replace_worker(self, rank: int, new: Replacement, *, shares_node: bool) -> None:
        """Start a new process for a rank in the slot of the dead one, or on another node."""
        node = self._find_shared_node(rank) if shares_node else ""
        slot = self._ranks[rank] = self._pool.replace(self._ranks[rank], node)
        slot.on_messages = new.on_messages
        slot.run_task = asyncio.ensure_future(self._run_replacement(rank, slot, new, node))
        if not node:
            loop = asyncio.get_running_loop()
            loop.call_later(RESERVED_START_S, self._replace_if_not_started, rank, slot, new)

    def _find_shared_node(self, rank: int) -> str:
        """Return the node with the fewest other ranks."""
        slots = [slot for other, slot in self._ranks.items() if other != rank and not slot.is_dead]
        nodes = Counter(slot.worker.node_id for slot in slots if slot.worker)
        return min(nodes, key=lambda node: nodes[node], default="")

    def _replace_if_not_started(self, rank: int, slot: ActorSlot, new: Replacement) -> None:
        """Use a node of another rank if the resources of a rank are missing."""
        if self._ranks.get(rank) is slot and slot.is_running and not slot.info.done():
            self.replace_worker(rank, new, shares_node=True)

    async def _run_replacement(
        self, rank: int, slot: ActorSlot, new: Replacement, node: str
    ) -> None:
        try:
            worker = await slot.info
        except RayError as error:
            death = await run_in_daemon_thread(_make_worker_died, error, node)
            new.on_messages(rank, [death])
            return
        suppress_death_messages([(worker.node_id, worker.pid)])
        stream = self._call_run(slot, new.make_assignment(worker))
        await self._receive_messages(rank, slot, stream, new.on_messages)

    async def _receive_messages(
        self,
        rank: int,
        slot: ActorSlot,
        stream: AsyncIterator[Awaitable[RayValue]],
        on_messages: OnMessages,
    ) -> None:
        try:
            async for reference in stream:
                messages = MESSAGE_BATCHES.decode_from_ray(await reference)
                # Recorded before the attempt handles the messages: it may end with one of them, and
                # then decides whether to keep the process.
                for message in messages:
                    if isinstance(message, ModulesImported):
                        self._pool.use_modules(message)
                slot.is_retired |= any(isinstance(message, ProcessRetired) for message in messages)
                on_messages(rank, messages)
        # Exceptions of the function are messages. This is an error in Drawbar's code in the worker,
        # or a message that cannot be encoded or decoded, so the process cannot be used further.
        except (RayTaskError, ProtocolError) as error:
            slot.is_marked_dead = True
            on_messages(rank, [RankFailed(failure=describe_worker_error(rank, error))])
        except RayError as error:
            slot.is_marked_dead = True
            # In a thread: it calls the node, which may not reply.
            death = await run_in_daemon_thread(_make_worker_died, error, slot.info.result().node_id)
            on_messages(rank, [death])

    def send_command(self, rank: int, command: Command) -> None:
        """Send a command to a rank. A rank that cannot handle it fails.

        If the process is dead, its message stream reports the death.
        """
        self._send(rank, COMMANDS.encode_for_ray(command))

    def broadcast_command(self, ranks: Collection[int], command: Command) -> None:
        """Send a command to several ranks, as `send_command` does for one."""
        is_large = isinstance(command, CollectiveResult) and (
            sum(payload.size for payload in command.payloads if payload) >= MIN_SHARED_BYTES
        )
        encoded = COMMANDS.encode_for_ray(command)
        # Each node fetches a stored object once. Ray replaces the reference by the object before it
        # calls the method.
        argument = ray.put(encoded) if is_large else encoded
        for rank in ranks:
            self._send(rank, argument)

    def _send(self, rank: int, command: RayValue | ray.ObjectRef[RayValue]) -> None:
        slot = self._ranks[rank]
        control = slot.actor.handle_command.options(concurrency_group="control")
        delivery = asyncio.ensure_future(await_reference(control.remote(self._attempt, command)))
        self._undelivered_commands.add(delivery)
        delivery.add_done_callback(partial(self._on_command_delivered, rank, slot))

    def _on_command_delivered(
        self, rank: int, slot: ActorSlot, delivery: asyncio.Future[None]
    ) -> None:
        self._undelivered_commands.discard(delivery)
        error = None if delivery.cancelled() else delivery.exception()
        if isinstance(error, RayTaskError) and slot.on_messages is not None:
            slot.is_marked_dead = True
            slot.on_messages(rank, [RankFailed(failure=describe_worker_error(rank, error))])

    async def collect_stacks(self) -> dict[int, Stack | None]:
        """Return the stack of every rank, or None for a rank that does not reply."""
        stacks = await asyncio.gather(*[_request_stack(slot) for slot in self._ranks.values()])
        return dict(zip(self._ranks, stacks, strict=True))

    async def end_attempt(self, end: AttemptEnd) -> None:
        """Interrupt functions and kill processes that do not stop within `end.grace` seconds."""
        slots = self._pool.slots
        participants = [index for index, slot in slots.items() if slot.run_task is not None]
        dead = [index for index, slot in slots.items() if slot.is_dead]
        # First, so that replacements start while the other processes are still stopping.
        self._pool.kill_slots(dead, should_replace=end.should_replace)
        running = {rank: slot.run_task for rank, slot in self._ranks.items() if slot.is_running}
        for rank in running:
            self.send_command(rank, end.interrupt)
        if running:
            await asyncio.wait([task for task in running.values() if task], timeout=end.grace)
        # The exceptions of other ranks are consequences of a death, which may be known only now.
        if not any(slot.is_dead for slot in self._ranks.values()):
            for rank in self._ranks.keys() & end.failed_ranks:
                self._ranks[rank].is_retired = True
        # A process is kept only if its stream has ended: then its thread has left user code, and
        # nothing of the old attempt is written later.
        remaining = slots.keys()  # empty if kill() was called in the meantime
        for index in (set(participants) - set(dead)) & remaining:
            slot = slots[index]
            if slot.is_dead or slot.is_running or slot.is_retired or not end.should_keep:
                self._pool.kill_slots([index], should_replace=end.should_replace)
            slot.run_task = None

    def exclude_node(self, node_id: str) -> bool:
        """Exclude a node from the next start after `kill`, if the other nodes have room."""
        workers = [slot.worker for slot in self._ranks.values()]
        nodes = Counter(worker.node_id for worker in workers if worker)
        return self._pool.exclude_node(node_id, nodes)

    # -- the end

    async def stop(self) -> None:
        """Run exit handlers in idle processes, kill all processes, and release the placement.

        A kill ends a process within about ten milliseconds; a regular exit takes seconds.
        """
        shutdowns = [
            asyncio.ensure_future(_shut_down_actor(slot))
            for slot in self._pool.list_ready()
            if not slot.is_dead
        ]
        if shutdowns:
            # Ray does not run the atexit handlers of a killed actor (ray-project/ray#12805), so the
            # worker runs them on request.
            await asyncio.wait(shutdowns, timeout=SHUTDOWN_S)
        self.kill()
        # Ray keeps an object as long as a reference to it exists, and a `RunHandle` may outlive the
        # run.
        self._train_loop.clear()
        self._memory_stores = {}

    def kill(self) -> None:
        """Kill all processes and release the placement."""
        self._pool.kill_all()

    # -- methods for backends

    def execute_single_async(
        self, rank: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> ray.ObjectRef[R]:
        """Call a function on one worker and return a reference to its result."""
        reference = self._ranks[rank].actor.execute.remote(serialize((function, args, kwargs)))
        return cast("ray.ObjectRef[R]", reference)

    def execute_async(
        self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> list[ray.ObjectRef[R]]:
        """Call a function on every worker and return references to the results, in rank order."""
        ranks = sorted(self._ranks)
        return [self.execute_single_async(rank, function, *args, **kwargs) for rank in ranks]

    def execute_single(
        self, rank: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a function on one worker and wait for its result."""
        return ray.get(self.execute_single_async(rank, function, *args, **kwargs))

    def execute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a function on every worker and wait for all results, in rank order."""
        return list(ray.get(self.execute_async(function, *args, **kwargs)))


async def _shut_down_actor(slot: ActorSlot) -> None:
    with contextlib.suppress(RayError):
        await slot.actor.shut_down.remote()


async def _request_stack(slot: ActorSlot) -> Stack | None:
    # With a short timeout: a C call that holds the GIL keeps even the control thread from replying.
    reference = slot.actor.capture_stack.options(concurrency_group="control").remote()
    try:
        return STACK.decode(await asyncio.wait_for(await_reference(reference), STACK_SECONDS))
    except RayError:
        return None
    except TimeoutError:
        return await _detect_stopped_worker(slot.worker) if slot.worker else None


async def _detect_stopped_worker(worker: WorkerInfo) -> Stack | None:
    """Check in another process on the node whether an unresponsive worker is suspended."""
    node = NodeAffinitySchedulingStrategy(worker.node_id, soft=False)
    remote: Any = ray.remote  # its stub takes no options here
    check = remote(detect_stopped_process).options(
        num_cpus=0, max_retries=0, scheduling_strategy=node
    )
    with contextlib.suppress(RayError, TimeoutError):
        stack: Stack | None = await asyncio.wait_for(
            await_reference(check.remote(worker.pid)), STOP_CHECK_S
        )
        return stack
    return None


def _make_worker_died(error: RayError, node_id: str) -> WorkerDied:
    """Describe the death of a worker. It counts as preempted if its node is lost or draining.

    Args:
        error: Error from Ray.
        node_id: Node of the worker; "" if it is unknown, because the worker has not started.
    """
    # Ray sets `preempted` for drained nodes. A lost node counts as alive for a while.
    preempted = bool(getattr(error, "preempted", False)) or is_node_loss(error)
    if node_id and not preempted:
        preempted = not is_node_available(node_id)
    return WorkerDied(detail=str(error), time=time.time(), is_preempted=preempted)


def describe_worker_error(rank: int, error: RayTaskError | ProtocolError) -> WorkerFailure:
    """Describe an error in Drawbar's own code in a worker, or in its messages."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return WorkerFailure(
        rank=rank,
        kind="exception",
        type_name=type(cause).__name__,
        message=str(cause),
        traceback=str(error),  # Ray puts the remote traceback there
        time=time.time(),
    )
