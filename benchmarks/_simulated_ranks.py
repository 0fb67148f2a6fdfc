"""Runs with simulated ranks, which share one thread.

The controller is the real one, so that its cost with thousands of ranks can be measured on one
machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from benchmarks._simulated_rank import SimulatedRank
from drawbar._modes.fixed_processes import FixedProcesses
from drawbar._modes.start_run import start_controller
from drawbar._modes.thread_group import InProcessExecution
from drawbar._process.exit_status import ExitReport
from drawbar._process.rank_assignment import rank_workers
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.stack import Stack
from drawbar._storage.run_directory import RunDirectory
from drawbar.train import DataParallelTrainer, Result, RunConfig, ScalingConfig
from drawbar.train._controller.run import RunSpec
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.commands import Command
from drawbar.train._protocol.messages import FINAL_MESSAGE_TYPES, GroupMessage, WorkerDied
from drawbar.train._worker.train_loop import TrainLoop
from drawbar.train._worker_group.worker_group import (
    AttemptEnd,
    OnMessages,
    OnWaiting,
)
from drawbar.train.run_modes import RunMode, RunView

RANKS_PER_NODE = 8
STOP_SECONDS = 1.0


def run_simulated_ranks(
    function: Callable[[SimulatedRank], Awaitable[object]],
    *,
    num_workers: int,
    run_config: RunConfig | None = None,
) -> Result:
    """Run a coroutine function on ranks that are objects of this process, up to thousands of them.

    The controller, the run directory, and all messages and commands are real. All ranks share one
    thread, so the controller's thread (`drawbar-controller`) uses only the time of the controller.

    Args:
        function: Coroutine function that each rank runs. Its argument is the rank.
        num_workers: Number of ranks, at least 1.
        run_config: As in `DataParallelTrainer`.

    Returns:
        The result of the run. It has no return values.

    Raises:
        TrainingFailedError: The run failed, as in `fit()`.
    """
    return _SimulatedTrainer(function, num_workers, run_config).fit()


class _SimulatedTrainer(DataParallelTrainer):
    def __init__(
        self,
        function: Callable[[SimulatedRank], Awaitable[object]],
        num_workers: int,
        run_config: RunConfig | None,
    ) -> None:
        # Not passed to the trainer, which pickles its function and rejects coroutine functions.
        self._mode = _SimulatedMode(function, num_workers)
        super().__init__(
            _run_nothing,
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=run_config,
        )

    def get_run_mode(self, *, use_caller_thread: bool) -> RunMode:
        return self._mode


def _run_nothing() -> None:
    """Training function of a run with simulated ranks, which run their own."""


@dataclass(frozen=True)
class _SimulatedMode:
    """Run a coroutine function on simulated ranks."""

    rank_function: Callable[[SimulatedRank], Awaitable[object]]
    num_workers: int

    def start(self, spec: RunSpec, train_loop: TrainLoop) -> RunView:
        return start_controller(
            spec,
            lambda path, _: SimulatedWorkerGroup(self.rank_function, self.num_workers, path),
        )


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


class SimulatedWorkerGroup(FixedProcesses, InProcessExecution):
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
