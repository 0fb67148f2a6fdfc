"""Simulated ranks, which share one thread, and their worker group.

The controller is the real one, so that its cost with thousands of ranks can be measured on one
machine. The ranks send real messages and handle real commands, which are not encoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from drawbar._base.metrics import normalize
from drawbar._process.exit_status import ExitReport
from drawbar._process.failure import describe_exception
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.stack import Stack
from drawbar._storage.checkpoint_store import make_default_name
from drawbar._storage.contents import FileEntry
from drawbar._storage.files import remove_tree
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.staging import make_shared_name
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.commands import (
    CollectiveResult,
    Command,
    CommitCompleted,
    InterruptFunction,
    PersistFiles,
    RequestAnnounced,
)
from drawbar.train._protocol.messages import (
    FINAL_MESSAGE_TYPES,
    CheckpointOffer,
    CollectiveCalled,
    FilesPersisted,
    FunctionStarted,
    GroupMessage,
    RankFailed,
    RankFinished,
    RankInterrupted,
    Report,
    RequestSeen,
    WorkerDied,
)
from drawbar.train._worker.command_queue import CommandKey, get_command_key
from drawbar.train._worker_group.ranks import rank_workers
from drawbar.train._worker_group.worker_group import (
    AttemptEnd,
    InProcessExecution,
    OnMessages,
    OnWaiting,
)

RANKS_PER_NODE = 8
STOP_SECONDS = 1.0
_LOCATION = "simulated rank"


class CallQueue:
    """Queue of calls for the event loop of another thread.

    Calls run in the order in which they were added. Those that are added while the loop is busy
    share one wake-up of the loop.

    Args:
        loop: Event loop that runs the calls.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._is_scheduled = False

    def add(self, call: Callable[[], object]) -> None:
        """Add a call. Can be called from any thread."""
        self._calls.append(call)
        if not self._is_scheduled:
            self._is_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended
                self._loop.call_soon_threadsafe(self._run_calls)

    def _run_calls(self) -> None:
        # Reset first: a call that is added from now on is run below or schedules another wake-up.
        self._is_scheduled = False
        with contextlib.suppress(IndexError):
            for _ in range(len(self._calls)):  # not forever: the loop has other work
                self._calls.popleft()()


class SimulatedWorkerGroup(InProcessExecution):
    """Workers as coroutines of one thread.

    Args:
        function: Coroutine function that every rank runs.
        num_workers: Number of ranks.
        run_path: Local path of the run directory.
    """

    def __init__(
        self,
        function: Callable[[SimulatedRank], Awaitable[object]],
        num_workers: int,
        run_path: str,
    ) -> None:
        self._function = function
        self._num_workers = num_workers
        self._directory = RunDirectory(Path(run_path))
        self._pids = list(range(1, num_workers + 1))  # by rank
        self._ranks: dict[int, SimulatedRank] = {}
        self._running: set[int] = set()
        self._all_ended = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._to_ranks = CallQueue(self._loop)
        self._to_controller = CallQueue(asyncio.get_running_loop())
        self._stop_requested = asyncio.Event()
        threading.Thread(
            target=self._run_ranks, name="drawbar-simulated-ranks", daemon=True
        ).start()

    def _run_ranks(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop_requested.wait())

    def __len__(self) -> int:
        return self._num_workers

    @property
    def num_idle_workers(self) -> int:
        """Always 0: simulated processes start at once."""
        return 0

    async def start(self, on_waiting: OnWaiting) -> list[tuple[WorkerInfo, Ranks]]:
        """Return the workers, `RANKS_PER_NODE` of them on each node."""
        return rank_workers([self._make_info(rank) for rank in range(self._num_workers)])

    def _make_info(self, rank: int) -> WorkerInfo:
        node, gpu = divmod(rank, RANKS_PER_NODE)
        return WorkerInfo(
            node_id=f"node-{node}",
            node_ip="127.0.0.1",
            hostname=f"node-{node}",
            pid=self._pids[rank],
            gpu_ids=(str(gpu),),
        )

    def run(self, assignments: Sequence[WorkerAssignment], on_messages: OnMessages) -> None:
        """Start an attempt."""
        self._all_ended.clear()
        for assignment in assignments:
            world_rank = assignment.ranks.world_rank
            send = partial(self._send_message, on_messages, world_rank)
            rank = self._ranks[world_rank] = SimulatedRank(assignment, send)
            self._running.add(world_rank)
            self._to_ranks.add(partial(rank.start, self._function))

    def _send_message(self, on_messages: OnMessages, rank: int, message: GroupMessage) -> None:
        if isinstance(message, WorkerDied):
            self._write_exit_report(rank)
        self._to_controller.add(partial(self._on_message, on_messages, rank, message))

    def _write_exit_report(self, rank: int) -> None:
        """Write the report that the sentinel of a killed process writes."""
        info = self._make_info(rank)
        report = ExitReport(
            pid=info.pid, status=int(signal.SIGKILL), time=time.time(), oom_kill=False, rss=None
        )
        path = self._directory.get_exit_report_path(info.hostname, info.pid)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(report))

    def _on_message(self, on_messages: OnMessages, rank: int, message: GroupMessage) -> None:
        if isinstance(message, (*FINAL_MESSAGE_TYPES, WorkerDied)):
            self._running.discard(rank)
            if not self._running:
                self._all_ended.set()
        if isinstance(message, WorkerDied):
            self._pids[rank] += self._num_workers  # the next attempt has a new process
        on_messages(rank, [message])

    def send_command(self, rank: int, command: Command) -> None:
        """Send a command to a rank."""
        self._to_ranks.add(partial(self._ranks[rank].handle_command, command))

    def broadcast_command(self, ranks: Collection[int], command: Command) -> None:
        """Send a command to several ranks."""
        self._to_ranks.add(partial(self._handle_broadcast, list(ranks), command))

    def _handle_broadcast(self, ranks: Sequence[int], command: Command) -> None:
        for rank in ranks:
            self._ranks[rank].handle_command(command)

    async def end_attempt(self, end: AttemptEnd) -> None:
        """Interrupt and wait for every running function."""
        self.broadcast_command(self._running, end.interrupt)
        if self._running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), end.grace)

    async def collect_stacks(self) -> dict[int, Stack | None]:
        """Return an empty stack for every running rank: simulated ranks have no frames."""
        return {rank: Stack(text=f"simulated rank {rank}\n") for rank in self._running}

    async def stop(self) -> None:
        """Interrupt running functions and end the thread."""
        await self.end_attempt(AttemptEnd(grace=STOP_SECONDS))
        self.kill()

    def kill(self) -> None:
        """End the thread, and with it all ranks."""
        self._to_ranks.add(self._stop_requested.set)


class SimulatedRank:
    """One rank of `run_simulated_ranks`, whose function is a coroutine.

    Args:
        assignment: Rank, run directory, and first report of the attempt.
        send: Callback that sends messages to the controller.

    Example:
        ```python
        async def train_func(rank):
            rank.report({"loss": 1.0})
            await rank.barrier()
            await rank.report_checkpoint({"loss": 0.5}, b"weights of this rank")
        ```
    """

    def __init__(self, assignment: WorkerAssignment, send: Callable[[GroupMessage], None]) -> None:
        self._assignment = assignment
        self._send = send
        self._next_report = assignment.first_report_index
        self._next_collective = 0
        self._awaited_commands: dict[CommandKey, asyncio.Future[Command]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def world_rank(self) -> int:
        """Rank of this worker in the group."""
        return self._assignment.ranks.world_rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._assignment.ranks.world_size

    @property
    def attempt(self) -> int:
        """Number of the attempt, from 0."""
        return self._assignment.attempt

    # -- calls by the function

    def report(self, metrics: Mapping[str, object]) -> None:
        """Report metrics without a checkpoint, as `drawbar.train.report` does."""
        self._send_report(metrics, None)

    async def report_checkpoint(
        self, metrics: Mapping[str, object], content: bytes = b"", *, is_staged: bool = True
    ) -> None:
        """Report a checkpoint with one file of this rank, and wait for its commit.

        Args:
            metrics: Metrics of the report.
            content: Content of the file `rank_<rank>.bin`.
            is_staged: Whether the file is written before the report, as with `checkpoint_dir()`.
                If False, it is written when the controller requests it, as for a directory of the
                user.
        """
        index = self._next_report
        file = FileEntry(f"rank_{self.world_rank}.bin", len(content))
        staging_directory = self._make_staging_directory() if is_staged else None
        if staging_directory is not None:
            (staging_directory / file.path).write_bytes(content)
        commit = self._expect((CommitCompleted, index))
        persist_request = self._expect((PersistFiles, index))
        self._send_report(metrics, self._make_offer(index, file, staging_directory))
        if staging_directory is None:
            command = await persist_request
            assert isinstance(command, PersistFiles)
            self._send(self._persist(command, file, content))
        await commit
        if staging_directory is not None:
            remove_tree(staging_directory)

    async def barrier(self) -> None:
        """Wait until every rank has called this, as `collective.barrier` does."""
        sequence, self._next_collective = self._next_collective, self._next_collective + 1
        result = self._expect((CollectiveResult, sequence))
        self._send(
            CollectiveCalled(
                sequence=sequence, number=sequence, kind="barrier", payload=None, location=_LOCATION
            )
        )
        await result

    def die(self) -> NoReturn:
        """End the simulated process without a final message, as SIGKILL does."""
        raise SimulatedDeath

    def _send_report(self, metrics: Mapping[str, object], offer: CheckpointOffer | None) -> None:
        index, self._next_report = self._next_report, self._next_report + 1
        self._send(
            Report(
                index=index,
                metrics=normalize(metrics),
                time=time.time(),
                location=_LOCATION,
                offer=offer,
                is_blocking=offer is not None,
            )
        )

    def _make_staging_directory(self) -> Path:
        return self._assignment.run_directory.staging.make_directory(f"rank_{self.world_rank}")

    def _make_offer(
        self, index: int, file: FileEntry, staging_directory: Path | None
    ) -> CheckpointOffer:
        return CheckpointOffer(
            directory=str(staging_directory or _LOCATION),
            files=(file,),
            is_staged=staging_directory is not None,
            checkpoint_name=make_default_name(index),
        )

    def _persist(self, command: PersistFiles, file: FileEntry, content: bytes) -> FilesPersisted:
        directory = self._assignment.run_directory.staging.make_shared_directory(
            make_shared_name(self.attempt, command.report_index)
        )
        (directory / file.path).write_bytes(content)
        return FilesPersisted(report_index=command.report_index, staging_directory=str(directory))

    def _expect(self, key: CommandKey) -> asyncio.Future[Command]:
        """Return a future for a command. Must be called before the message that requests it."""
        future: asyncio.Future[Command] = asyncio.get_running_loop().create_future()
        self._awaited_commands[key] = future
        return future

    # -- calls by the worker group, in the thread of the ranks

    def start(self, function: Callable[[SimulatedRank], Awaitable[object]]) -> None:
        """Start the function."""
        self._task = asyncio.get_running_loop().create_task(self._run(function))

    def handle_command(self, command: Command) -> None:
        """Handle a command from the controller."""
        if isinstance(command, InterruptFunction):
            if self._task is not None:
                self._task.cancel()
            return
        if isinstance(command, RequestAnnounced):  # a simulated rank has no `should_checkpoint()`
            self._send(RequestSeen(request_id=command.request_id, call=1))
            return
        future = self._awaited_commands.pop(get_command_key(command), None)
        if future is not None and not future.done():
            future.set_result(command)

    async def _run(self, function: Callable[[SimulatedRank], Awaitable[object]]) -> None:
        self._send(FunctionStarted(time=time.time()))
        final_message: GroupMessage
        try:
            await function(self)
            final_message = RankFinished(time=time.time())
        except asyncio.CancelledError:
            final_message = RankInterrupted()
        except SimulatedDeath:
            final_message = WorkerDied(detail="simulated death", time=time.time())
        except Exception as error:
            num_reports = self._next_report - self._assignment.first_report_index
            rank = self._assignment.ranks.world_rank
            failure = describe_exception(error, rank, self._assignment.log_path, num_reports)
            final_message = RankFailed(failure=failure)
        self._send(final_message)


class SimulatedDeath(Exception):
    """A simulated process dies."""
