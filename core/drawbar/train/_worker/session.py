"""Worker side of one attempt: send messages and handle commands.

A session sends ordered messages through a callback and receives commands from any thread. It does
not depend on Ray or on the threads of the worker, so the same class serves an actor, the driver's
process (`num_workers=0`), and the threads of `drawbar.train.testing`.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec

from drawbar._base.frames import format_caller_location
from drawbar._base.metrics import Metrics, normalize
from drawbar._process.imported_modules import ImportedModules
from drawbar._process.stack import Stack
from drawbar._process.training_thread import InterruptScope, ThreadGuard
from drawbar._process.worker_failure import WorkerFailure
from drawbar._records.events import ShardEpochEnded
from drawbar._recovery.messages import GroupFormed, RanksLost
from drawbar._recovery.rank_recovery import RankRecovery
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.checkpoint_store import UploadTarget
from drawbar._storage.files import remove_tree
from drawbar._storage.manifest import ReportedCheckpointStatus
from drawbar.train._config.checkpoint_modes import CheckpointConsistencyMode
from drawbar.train._config.validation_config import resolve_validation
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.commands import (
    CheckpointListReply,
    Command,
    CommitCompleted,
    DiagnosisReply,
    InterruptFunction,
    RequestAgreed,
    RequestAnnounced,
)
from drawbar.train._protocol.messages import (
    CheckpointListRequest,
    CheckpointOffer,
    DiagnosisRequest,
    Message,
    Observation,
    Report,
    RollbackRequested,
)
from drawbar.train._worker.collectives import Collectives
from drawbar.train._worker.command_queue import CommandQueue
from drawbar.train._worker.data_sources import DataSources
from drawbar.train._worker.node_local_storage import NodeLocalStorage
from drawbar.train._worker.progress_sender import ProgressSender
from drawbar.train._worker.rank_requests import RankRequests
from drawbar.train._worker.rank_timer import RankTimer
from drawbar.train._worker.report_checks import UploadOptions
from drawbar.train._worker.uploads import Uploads

FAILURE_FLUSH_S = 2.0
"""Time limit for commits in flight before a failure is reported, unless files are being stored."""

T = TypeVar("T")


class ProgramProxy(Protocol):
    """Program that runs in place of the training function."""

    def handle_command(self, command: Command) -> None:
        """Handle a command from the controller. Called from any thread; never blocks."""
        ...

    def capture_stack(self) -> Stack | None:
        """Return the stack of the program, or None if it does not reply."""
        ...

    def kill(self) -> None:
        """Kill the program. Called from any thread."""
        ...


class Session:
    """One attempt of one rank, from the start of the training function to its end.

    Args:
        assignment: Rank, checkpoint, and datasets for this attempt.
        send: Callback that sends messages to the controller.
        cache: User objects that live as long as the process.
    """

    def __init__(
        self,
        assignment: WorkerAssignment,
        send: Callable[[Message], None],
        cache: dict[object, object],
    ) -> None:
        self.assignment = assignment
        self.cache = cache
        self.directory = assignment.run_directory
        self.checkpoint = assignment.resume_checkpoint
        self._latest_commit = assignment.first_report_index - 1
        self._unread_checkpoint = assignment.resume_checkpoint
        self.should_clean_up_node = False
        self._node_local_storage: NodeLocalStorage | None = None
        self._staging_label = f"rank_{assignment.ranks.world_rank}"
        self.send = send
        self.interrupt_scope = InterruptScope()
        self._command_queue = CommandQueue(send, self.interrupt_scope)
        self.timer = RankTimer()
        self.data_sources = DataSources(assignment.open_shards, assignment.data_positions)
        self.progress = ProgressSender(assignment.ranks.world_rank, send)
        self.uploads = self._make_uploads(self.directory.checkpoints)
        self.thread_guard = ThreadGuard(assignment.ranks)
        self._send_lock = threading.RLock()  # messages are sent in the order of their numbers
        self.collectives = Collectives(
            assignment.ranks.world_rank,
            self.thread_guard,
            self._send_lock,
            self._command_queue,
            self.timer,
        )
        self.requests = RankRequests(self.thread_guard, self._command_queue, self.timer)
        self.recovery: RankRecovery | None = None
        if assignment.is_recovered_in_place:
            self.recovery = RankRecovery(assignment, send, self._command_queue, self)
        self._next_report = assignment.first_report_index
        self._offers: dict[int, CheckpointOffer] = {}
        self.final_notices: list[str] = []
        self._locals: dict[object, Any] = {}  # objects of integrations, by factory
        self.training_count = itertools.count(1)  # a training function may train several times
        self.program: ProgramProxy | None = None
        self.get_log_size: Callable[[], int] = lambda: 0
        self.is_timed_by_program = False
        self.is_first_of_process = True
        self.imported_modules: ImportedModules | None = None

    def get_local(self, factory: Callable[[], T]) -> T:
        """Return the object of this attempt that `factory` creates on the first call."""
        with self._send_lock:
            if factory not in self._locals:
                self._locals[factory] = factory()
            value: T = self._locals[factory]
        return value

    @property
    def is_storage_node_local(self) -> bool:
        """True if this node does not share the run directory."""
        return self._node_local_storage is not None

    def forward(self, message: Message) -> None:
        """Send a message of the program that runs in place of the training function."""
        with self._send_lock:
            if isinstance(message, Report):
                self._next_report = message.index + 1
            if isinstance(message, Observation):
                self.is_timed_by_program |= message.kind == "rank_times"
            self.send(message)

    @property
    def report_count(self) -> int:
        """Number of reports of this rank in this attempt."""
        return self._next_report - self.assignment.first_report_index

    # -- reports and checkpoints

    def report_metrics(self, metrics: Mapping[str, object], *, is_buffered: bool = False) -> None:
        """Report metrics without a checkpoint.

        Args:
            metrics: Metrics by name.
            is_buffered: Whether the report may be sent later, together with others.
        """
        if self.recovery is not None and self.recovery.is_joining:
            return  # a dead process of this rank has made this report
        self.uploads.async_commits.raise_error()
        # Normalize before the index is used: invalid metrics must not leave a gap, because the
        # reports of all ranks are matched by index.
        values = normalize(metrics)
        location = format_caller_location()
        with self._send_lock:
            self.thread_guard.check_reporting_thread("report()")
            index, self._next_report = self._next_report, self._next_report + 1
            observation = self.timer.on_report()
            self.send(
                Report(
                    index=index,
                    metrics=values,
                    time=time.time(),
                    location=location,
                    is_buffered=is_buffered,
                    observation=observation,
                )
            )
        # An interrupt is only raised in the function's own thread. Any other thread that reports
        # is interrupted here.
        self._command_queue.raise_if_interrupted()

    def report_checkpoint(
        self,
        metrics: Mapping[str, object],
        checkpoint: Checkpoint | str | os.PathLike[str] | None,
        options: UploadOptions,
        validation: object,
    ) -> None:
        """Report metrics and a checkpoint. See `drawbar.train.report`."""
        if self.recovery is not None and self.recovery.is_joining:
            return  # a dead process of this rank has made this report
        self.uploads.async_commits.raise_error()
        default = self.assignment.spec.default_validation
        to_validate = resolve_validation(validation, default, has_checkpoint=checkpoint is not None)
        assert checkpoint is not None  # resolve_validation rejects a validation without one
        values = normalize(metrics)
        options.check()
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        location = format_caller_location()
        with self._send_lock:
            self.thread_guard.check_reporting_thread("report()")
            index = self._next_report
            offer = self.uploads.make_offer(checkpoint, options, index)
            # After the offer: if it raises, nothing was reported and the user may report again.
            self._next_report += 1
            self._offers[index] = offer
            self.timer.on_report()
            self.progress.flush()
            self.send(
                Report(
                    index=index,
                    metrics=values,
                    time=time.time(),
                    location=location,
                    offer=offer,
                    is_blocking=options.is_blocking,
                    data_positions=self.data_sources.get_positions(),
                    validation=to_validate,
                    observation=self.timer.observe(),
                    unread_checkpoint=self._take_unread_checkpoint(),
                )
            )
        # Without the lock: other threads may report while this one waits for its commit.
        with self.timer.measure("checkpoint_blocked"):
            if options.is_blocking:
                self.uploads.complete_commit(index, offer)
            else:
                self.uploads.async_commits.submit(index, offer)

    def roll_back(self, reason: str, skip: int, to: int) -> NoReturn:
        """End the attempt of all ranks. See `drawbar.train.rollback`."""
        positions = self.data_sources.get_positions_after(skip)
        self.progress.flush()
        failure = WorkerFailure(
            rank=self.assignment.ranks.world_rank,
            kind="rollback",
            type_name="rollback",
            message=reason,
            location=format_caller_location(),
            hostname=os.uname().nodename,
            pid=os.getpid(),
            time=time.time(),
            num_reports=self.report_count,
        )
        with self._send_lock:
            self.send(
                RollbackRequested(
                    reason=reason,
                    skip=skip,
                    to=to,
                    report_index=self._next_report,
                    data_positions=positions,
                    failure=failure,
                )
            )
        self._command_queue.wait_until(lambda: False, None)
        raise AssertionError("a rollback interrupts the training function")

    def get_counters(self) -> tuple[int, int, int]:
        """Return the numbers of reports, collectives, and calls of `should_checkpoint()`."""
        return self._next_report, self.collectives.call_count, self.requests.call_count

    def set_counters(self, counters: tuple[int, int, int]) -> None:
        """Continue the numbering of another rank, whose training this rank joins."""
        self._next_report, collectives, self.requests.call_count = counters
        self.collectives.set_call_count(collectives)

    def _take_unread_checkpoint(self) -> str:
        """Return the name of the unread resume checkpoint, once and only on rank 0."""
        checkpoint, self._unread_checkpoint = self._unread_checkpoint, None
        if checkpoint is None or self.assignment.ranks.world_rank != 0:
            return ""
        return Path(checkpoint.path).name

    def send_epoch_ended(self, message: ShardEpochEnded) -> None:
        """Report the end of an iteration over a shard."""
        with self._send_lock:
            self.send(msgspec.structs.replace(message, report_index=self._next_report))

    def use_node_local_storage(self) -> None:
        """Transfer checkpoints to and from the driver's node.

        Needed if this node does not share the run directory.
        """
        storage = NodeLocalStorage(self.directory, self._command_queue)
        self._node_local_storage = storage
        self.uploads = self._make_uploads(storage)

    def _make_uploads(self, target: UploadTarget) -> Uploads:
        return Uploads(
            self.directory,
            target,
            self._staging_label,
            self.assignment.attempt,
            self._command_queue,
        )

    def get_latest_checkpoint(self) -> Checkpoint | None:
        """Return the latest committed checkpoint that this rank knows."""
        return self.ensure_local(self.checkpoint)

    def ensure_local(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Fetch a checkpoint if this node does not share the run directory, and return it."""
        self._unread_checkpoint = None
        if self._node_local_storage is not None and checkpoint is not None:
            self._node_local_storage.fetch_checkpoint(checkpoint)
        return checkpoint

    def close(self, flush_timeout: float) -> None:
        """End the attempt early.

        Args:
            flush_timeout: Time limit in seconds for checkpoints in flight. After it, threads that
                wait for commands are interrupted.
        """
        self.progress.flush()
        self.uploads.async_commits.drain(flush_timeout)
        self._command_queue.interrupt(
            self._command_queue.interrupt_reason or "the training function has ended"
        )

    @contextmanager
    def checkpoint_dir(self) -> Iterator[Path]:
        """Create a staging directory for a checkpoint. See `drawbar.train.checkpoint_dir`."""
        path = self.directory.staging.make_directory(self._staging_label)
        try:
            with self.timer.measure("checkpoint_save"):
                yield path
        except BaseException:
            # A reported directory belongs to the controller and may be part of a commit.
            if all(offer.directory != str(path) for offer in self._offers.values()):
                remove_tree(path)
            raise

    def get_all_checkpoints(
        self, consistency_mode: CheckpointConsistencyMode, timeout: float | None
    ) -> list[tuple[Checkpoint, Metrics, ReportedCheckpointStatus]]:
        """Return all committed checkpoints. See `drawbar.train.get_all_reported_checkpoints`."""
        self._unread_checkpoint = None
        has_timeout, location = timeout is not None, format_caller_location()
        reply = self._command_queue.request(
            lambda request_id: CheckpointListRequest(
                request_id=request_id,
                consistency_mode=consistency_mode,
                has_timeout=has_timeout,
                location=location,
            ),
            CheckpointListReply,
            timeout,
            lambda request_id: CheckpointListRequest(request_id=request_id, consistency_mode=None),
        )
        return [
            (self.directory.checkpoints.get_checkpoint(name), metrics, status)
            for name, metrics, status in reply.checkpoints
        ]

    def diagnose(self) -> str:
        """Write the stacks of all ranks to the run directory and return a summary."""
        reply = self._command_queue.request(
            lambda request_id: DiagnosisRequest(request_id=request_id), DiagnosisReply
        )
        return reply.text

    # -- commands

    def handle_command(self, command: Command) -> None:
        """Handle a command from the controller. Called from any thread; never blocks."""
        # Read once: the thread that waits for the program may reset it concurrently.
        program = self.program
        if program is None or isinstance(command, InterruptFunction):
            self._apply_command(command)
        if program is not None:
            program.handle_command(command)

    def _apply_command(self, command: Command) -> None:
        match command:
            case InterruptFunction():
                # The queue first: a thread that waits there only receives the exception after it
                # wakes up (python/cpython#144748).
                self._command_queue.interrupt(command.reason)
                self.interrupt_scope.interrupt()
            case CommitCompleted():
                # An asynchronous checkpoint may be committed after a newer one.
                if command.report_index >= self._latest_commit:
                    name, self._latest_commit = command.checkpoint_name, command.report_index
                    self.checkpoint = self.directory.checkpoints.get_checkpoint(name)
                # Only a rank that offered files waits for the commit; otherwise the command would
                # stay in the queue.
                if self._offers.pop(command.report_index, None) is not None:
                    self._command_queue.put(command)
            case RequestAnnounced() | RequestAgreed():
                self.requests.handle_command(command)
            case GroupFormed() | RanksLost():
                if self.recovery is not None:
                    self.recovery.handle_command(command)
            case _:
                self._command_queue.put(command)
