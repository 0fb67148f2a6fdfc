"""State of one attempt and the handling of its messages.

An attempt starts when every worker process has started and has a rank. It ends when the training
function has returned on every rank or has failed on one. The controller calls `on_messages` for the
messages on its queue, until `has_ended` is true.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from drawbar._process.output_lines import OutputLine
from drawbar._process.ranks import WorkerInfo
from drawbar._process.stalled_ranks import RankActivity
from drawbar._records.batch_counts import BatchCountCheck
from drawbar._records.event_stream import Emit
from drawbar._records.events import (
    AttemptEndCause,
    AttemptStarted,
    PreemptionAnnounced,
    ShardEpochEnded,
)
from drawbar._records.live_events import Notice, RoundCompleted
from drawbar._recovery.attempt_recovery import (
    AttemptRecovery,
    Declined,
    find_obstacle,
    make_reports_lost,
)
from drawbar._recovery.messages import RecoveryMessage, RecoveryNotice, RecoveryReady
from drawbar._recovery.node_watcher import find_preemption
from drawbar._storage.manifest import Manifest
from drawbar.train._controller.attempt_events import ReportEmitter, make_event
from drawbar.train._controller.checkpoint_coordinator import CheckpointCoordinator
from drawbar.train._controller.commits import CommitContext
from drawbar.train._controller.failures import (
    AttemptFailure,
    describe_divergence,
    describe_interruption,
)
from drawbar.train._controller.progress import AttemptProgress
from drawbar.train._controller.rank_progress import ActivityClock, collect_payloads
from drawbar.train._controller.request_agreement import RequestAgreement
from drawbar.train._controller.run import OpenRun
from drawbar.train._protocol import messages
from drawbar.train._protocol.commands import CollectiveResult, CommitCompleted
from drawbar.train._worker_group.worker_group import WorkerGroup

T = TypeVar("T")

_NOT_IN_PLACE = "The attempt ends, because it cannot be recovered in place"


class Attempt:
    """State of one attempt.

    Args:
        start: Event of the start.
        workers: Process of each rank, in rank order.
        run: Open run.
        group: Workers.
        checkpoints: Checkpoints of the run.
        emit: Callback that publishes events.
        on_diagnosis_request: Collects the stacks of all ranks and replies to the rank that requests
            them.
        in_place: Recovers from deaths in place; None if a death ends the attempt.

    Attributes:
        failure: Failure that ended the attempt; None if there is none.
        error: Error in the driver that ended the attempt, for example of the journal.
    """

    def __init__(
        self,
        start: AttemptStarted,
        workers: Sequence[WorkerInfo],
        *,
        run: OpenRun,
        group: WorkerGroup,
        checkpoints: CheckpointCoordinator,
        emit: Emit,
        on_diagnosis_request: Callable[[int, messages.DiagnosisRequest], None],
        in_place: AttemptRecovery[messages.WorkerDied] | None = None,
    ) -> None:
        self.number = start.attempt
        self.workers = list(workers)
        # Processes that were replaced in place, by rank. A recovery clears them.
        self.dead_workers: dict[int, WorkerInfo] = {}
        self.finished: dict[int, messages.RankFinished] = {}
        self._program_pids: dict[int, int] = {}
        self.requests = RequestAgreement(len(workers), group.broadcast_command)
        self.reports = ReportEmitter(self.number, emit)
        self._emit = emit
        self._broadcast_command = group.broadcast_command
        # Only callbacks receive rounds.
        self._should_emit_rounds = bool(run.spec.run_config.callbacks)
        self._checkpoints = checkpoints
        self._on_diagnosis_request = on_diagnosis_request
        self._in_place = in_place
        self.progress = AttemptProgress(
            len(workers), start.first_report_index, should_keep_all_rounds=self._should_emit_rounds
        )
        checkpoints.start_attempt(
            self.progress, CommitContext(run.run_id, self.number, len(workers), group.send_command)
        )
        self._round_metrics: dict[int, list[dict[str, object]]] = {}
        # The hang timeout starts here and does not include the start of the workers.
        self.activity_clock = ActivityClock(len(workers))
        # By rank: line of the last report or collective.
        self._last_locations: dict[int, str] = {}
        self.batch_counts = BatchCountCheck(len(workers))
        self.has_ended = False
        self.failure: AttemptFailure | None = None
        self.error: Exception | None = None
        self._failure_times: dict[int, float] = {}  # by rank: when its function raised
        self.last_report_times: dict[int, float] = {}  # by rank: its last report, or its start

    def on_messages(self, rank: int, batch: Sequence[messages.GroupMessage]) -> None:
        """Handle messages from a rank in order. An exception ends the attempt with an `error`."""
        reports: list[messages.Report] = []
        for message in batch:
            if isinstance(message, messages.Report):
                reports.append(message)
                continue
            self._try(self._handle_reports, rank, reports)
            reports = []
            if self.has_ended:
                self._handle_late_message(rank, message)
            else:
                self._try(self._handle_message, rank, message)
        self._try(self._handle_reports, rank, reports)

    def _try(self, handle: Callable[[int, T], None], rank: int, received: T) -> None:
        """Handle messages of a rank. An exception in the driver ends the attempt."""
        try:
            handle(rank, received)
        except Exception as error:
            if not self.has_ended:
                self.error = error
                self.has_ended = True

    def _handle_reports(self, rank: int, reports: Sequence[messages.Report]) -> None:
        """Handle consecutive reports of a rank."""
        if self._in_place is not None:
            reports = self._drop_repeated(rank, reports)
        if reports and not self.has_ended:
            # First, so that no command or event refers to a report that is not stored.
            self.reports.emit(rank, reports)
        for report in reports:
            if not self.has_ended:
                self._handle_message(rank, report)

    def fail(self, failure: AttemptFailure) -> bool:
        """End the attempt. Messages about failures are added to the failure from now on.

        Returns:
            False if the attempt had already ended.
        """
        if self.has_ended:
            return False
        # Ranks that have raised by now may be the root cause, although their errors have not
        # arrived yet.
        failure.failure_times = self._failure_times
        failure.returned = set(self.finished)
        if self._in_place is not None and self._in_place.deaths:
            failure.deaths = {**self._in_place.deaths, **failure.deaths}
            if failure.failures:
                self._emit(Notice(f"{_NOT_IN_PLACE}: {failure.failures[0].headline()}"))
        self.failure = failure
        self.has_ended = True
        return True

    def close(self) -> None:
        """Ignore all further messages."""
        # Without a failure, late messages are not added to it either.
        self.failure = None
        self.has_ended = True

    def get_remaining_seconds(self, timeout: float) -> float:
        """Return the time until no rank has sent a message for `timeout` seconds, at least 0.

        A rank that waits for validations suspends the timeout: validations have their own.
        """
        remaining = timeout - self.activity_clock.get_idle_seconds()
        if remaining <= 0 and self._checkpoints.is_rank_waiting_for_validation:
            return timeout  # check again after another timeout
        return max(remaining, 0.0)

    def _handle_late_message(self, rank: int, message: messages.GroupMessage) -> None:
        match message:
            # Printed before the attempt ended, or while the function cleans up. Lines on stderr are
            # omitted: most are libraries' messages about lost peers, and the log contains them. The
            # output of a script is shown completely instead, as under torchrun.
            case (
                OutputLine(stream="stdout")
                | messages.OutputBytes()
                | messages.Observation(kind="progress")
            ):
                self._emit(make_event(self.number, rank, message))
            case _ if self.failure is not None:
                if isinstance(message, messages.FilesPersisted | messages.FileChunk):
                    self._checkpoints.on_message(rank, message)
                self.failure.on_message(rank, message)

    def _handle_message(self, rank: int, message: messages.GroupMessage) -> None:
        if getattr(message, "is_activity", True):
            self.activity_clock.record(rank)  # all that a `Heartbeat` does
        match message:
            case messages.Report():
                self._on_report(rank, message)
            case OutputLine() | messages.OutputBytes() | messages.Observation():
                self._emit(make_event(self.number, rank, message))
            case messages.FunctionImported():
                self._emit(make_event(self.number, rank, message))
            case messages.CheckpointWaitStarted():
                self.progress.on_waiting_for_checkpoint(rank, message.report_index)
                self._check_divergence()
            case (
                messages.FilesPersisted()
                | messages.FileChunk()
                | messages.FileRequest()
                | messages.CheckpointDiscarded()
            ):
                self._checkpoints.on_message(rank, message)
            case messages.CheckpointListRequest():
                self._checkpoints.on_message(rank, message)
                self._check_divergence()
            case messages.RequestSeen():
                self.requests.on_seen(rank, message, self.progress.ranks[rank].reports)
            case messages.CollectiveCalled():
                self._on_collective(rank, message)
            case ShardEpochEnded():
                self._on_epoch_ended(rank, message)
            case messages.DiagnosisRequest():
                self._on_diagnosis_request(rank, message)
            case messages.FunctionFailed():
                self._failure_times[rank] = message.time
            case messages.FunctionStarted():
                self.requests.on_started(rank)
                self.last_report_times[rank] = message.time
                if self._in_place is None or not self._in_place.is_replaced(rank):
                    self._emit(make_event(self.number, rank, message))
            case messages.ProgramStarted():
                self._program_pids[rank] = message.pid
                self._emit(make_event(self.number, rank, message))
            case messages.RankFinished():
                self._on_finished(rank, message)
            case messages.RankFailed() | messages.RollbackRequested():
                self.fail(AttemptFailure.of(message))
            case messages.WorkerDied():
                self._on_death(rank, message)
            case messages.RankInterrupted():
                self.fail(AttemptFailure("worker", [describe_interruption(rank)]))
            case _ if isinstance(message, RecoveryMessage | RecoveryNotice):
                self._on_recovery_message(rank, message)

    @property
    def is_finished(self) -> bool:
        """True if the training function has returned on every rank."""
        return len(self.finished) == len(self.workers)

    def on_draining_nodes(self, draining: Mapping[str, int]) -> None:
        """Request a checkpoint if nodes of this attempt are being drained.

        Args:
            draining: Draining nodes: id to deadline in ms since the epoch, 0 if unknown.
        """
        info = find_preemption(self.workers, draining)
        # The nodes are queried every two seconds, but announced once.
        if info is not None and info != self.requests.latest.preemption:
            self._emit(PreemptionAnnounced(time=time.time(), attempt=self.number, info=info))
            self.requests.request(preemption=info)

    def get_activity(self) -> dict[int, RankActivity]:
        """Return the last activity of each rank that has not finished."""
        idle_seconds = self.activity_clock.get_idle_seconds_by_rank()
        return self.progress.get_activity(idle_seconds, self._last_locations)

    def get_pid(self, rank: int) -> int:
        """Return the process ID of a rank's program, or of its worker if it runs none."""
        return self._program_pids.get(rank, self.workers[rank].pid)

    def count_reports(self, rank: int) -> int:
        """Return the number of reports of a rank in this attempt."""
        return self.progress.ranks[rank].reports - self.progress.first_index

    def on_committed(self, manifest: Manifest, command: CommitCompleted) -> None:
        """Record a commit and notify every rank."""
        self.progress.on_committed(manifest.index)
        # A rank that has returned would ignore the command, which is a remote call on Ray.
        running = [rank for rank in range(len(self.workers)) if rank not in self.finished]
        self._broadcast_command(running, command)
        self._checkpoints.send_ready_replies()
        metrics = self._round_metrics.pop(manifest.index, None)
        if metrics is not None:
            checkpoint = self._checkpoints.registry.get_checkpoint(manifest)
            self._emit(RoundCompleted(manifest.index, metrics, checkpoint))

    def _on_report(self, rank: int, report: messages.Report) -> None:
        if report.observation is not None:
            self._emit(make_event(self.number, rank, report.observation))
        self._last_locations[rank] = report.location
        self.last_report_times[rank] = report.time
        self._checkpoints.record_moved_files(rank, self.workers[rank], report)
        for complete in self.progress.on_report(rank, report):
            if conflict := complete.find_conflict():
                self.fail(AttemptFailure("divergence", [describe_divergence(conflict)]))
                return
            if self._should_emit_rounds:
                # Emit after the commit, so that callbacks only receive committed checkpoints.
                metrics = [report.metrics for _, report in sorted(complete.reports.items())]
                if complete.offers:
                    self._round_metrics[complete.index] = metrics
                else:
                    self._emit(RoundCompleted(complete.index, metrics, None))
            self._checkpoints.commit_round(complete)
        self._checkpoints.send_ready_replies()
        if report.offer is not None:
            self._check_divergence()

    def _on_epoch_ended(self, rank: int, shard_epoch: ShardEpochEnded) -> None:
        self._emit(make_event(self.number, rank, shard_epoch))
        try:
            if text := self.batch_counts.add(rank, shard_epoch):
                self._emit(Notice(text))
        except ValueError as error:
            self.fail(AttemptFailure("configuration", exception=error))

    def _on_collective(self, rank: int, call: messages.CollectiveCalled) -> None:
        self._last_locations[rank] = call.location
        if self._in_place is not None and self.progress.has_left_collective(rank, call.sequence):
            payloads = self._in_place.repeat_collective(call.sequence, rank, call.location)
            if isinstance(payloads, Declined):
                self._conclude(payloads)
            else:
                result = CollectiveResult(sequence=call.sequence, payloads=payloads)
                self._broadcast_command([rank], result)
            return
        calls = self.progress.on_collective(rank, call)
        if calls is None:
            self._check_divergence()
            return
        try:
            payloads = collect_payloads(calls)
            if self._in_place is not None:
                lines = {other: called.location for other, called in calls.items()}
                self._in_place.collectives.record(call.sequence, lines, payloads)
        except ValueError as error:
            self.fail(AttemptFailure("configuration", exception=error))
            return
        self._broadcast_command(calls, CollectiveResult(sequence=call.sequence, payloads=payloads))

    # -- recovery in place

    def _on_death(self, rank: int, death: messages.WorkerDied) -> None:
        if self._in_place is None:
            self.fail(AttemptFailure("worker", deaths={rank: death}))
            return
        self.requests.on_lost(rank)
        progress = self.progress.ranks[rank]
        is_in_checkpoint = self._checkpoints.is_waiting_for(rank) or bool(
            progress.pending_offers or progress.awaited_report or progress.awaited_checkpoints
        )
        obstacle = find_obstacle(bool(self.finished), is_in_checkpoint)
        cause: AttemptEndCause = "preemption" if death.is_preempted else "worker"
        self._conclude(self._in_place.on_death(rank, death, obstacle, cause))

    def _on_recovery_message(self, rank: int, message: RecoveryMessage | RecoveryNotice) -> None:
        if self._in_place is None:
            return
        latest = self._checkpoints.registry.latest
        if latest and isinstance(message, RecoveryReady) and self._in_place.is_replaced(rank):
            name = CommitCompleted(report_index=latest.index, checkpoint_name=latest.name)
            self._broadcast_command([rank], name)
        self._conclude(self._in_place.on_message(rank, message))

    def _conclude(self, outcome: Declined | None) -> None:
        if outcome is not None:
            self._emit(Notice(f"{_NOT_IN_PLACE}: {outcome.reason}"))
            self.fail(AttemptFailure("worker"))

    def _drop_repeated(
        self, rank: int, reports: Sequence[messages.Report]
    ) -> list[messages.Report]:
        """Return the reports that no dead process of the rank has made."""
        new_reports, expected = list[messages.Report](), self.progress.ranks[rank].reports
        for report in reports:
            if report.index >= expected:
                if report.index > expected:
                    self._emit(make_reports_lost(rank, expected, report.index))
                expected = report.index + 1
                new_reports.append(report)
            elif report.offer is not None:  # it was committed before the process died
                name = report.offer.checkpoint_name
                command = CommitCompleted(report_index=report.index, checkpoint_name=name)
                self._broadcast_command([rank], command)
        return new_reports

    def _on_finished(self, rank: int, message: messages.RankFinished) -> None:
        self.finished[rank] = message
        if self._in_place is not None:
            self._conclude(self._in_place.on_returned(rank))
        # A return value that cannot be pickled is not a failure: training has succeeded.
        if message.serialization_error:
            self._emit(Notice(f"rank {rank}: {message.serialization_error}"))
        self.progress.on_finished(rank)
        self.requests.on_finished(rank)
        self._checkpoints.send_ready_replies()
        self._check_divergence()
        self.has_ended |= self.is_finished

    def _check_divergence(self) -> None:
        reason = self.progress.find_divergence()
        if reason is not None:
            self.fail(AttemptFailure("divergence", [describe_divergence(reason)]))


class MessagesReceived(msgspec.Struct, frozen=True):
    """Event: a rank of an attempt has sent messages, or its process has died."""

    attempt: Attempt
    rank: int
    batch: Sequence[messages.GroupMessage]


class HangDetected(NamedTuple):
    """Event: no rank of an attempt has been active for `hang_timeout`, in seconds."""

    attempt: Attempt
    hang_timeout: float
