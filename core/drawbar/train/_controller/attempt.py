"""One attempt: what each thing that a rank says means.

An attempt begins when every process is up and has its ranks, and is over when every function has
returned or one has failed. The worker group calls `hear` on the event loop, and the controller
awaits `over`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from drawbar.train._controller.attempt_failure import AttemptFailure
from drawbar.train._controller.batch_counts import BatchCountCheck
from drawbar.train._controller.checkpoint_queries import CheckpointQueries
from drawbar.train._controller.commits import CheckpointCommitter
from drawbar.train._controller.failures import describe_divergence, describe_interruption
from drawbar.train._controller.progress import AttemptProgress, RankActivity
from drawbar.train._controller.validations import ValidationScheduler
from drawbar.train._errors import WorkerFailure
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import (
    AttemptEndCause,
    BytesWritten,
    DatasetEpochEnded,
    LinePrinted,
    Notice,
    ReportReceived,
    RoundCompleted,
    UserFunctionStarted,
)
from drawbar.train._messages import (
    CheckpointsAsked,
    CollectiveCalled,
    DiagnosisAsked,
    Discarded,
    Failed,
    FileAsked,
    FileSent,
    Finished,
    FunctionRaised,
    FunctionStarted,
    Gone,
    Interrupted,
    Message,
    PassEnded,
    Persisted,
    PreemptionInfo,
    Printed,
    Reported,
    SignOfLife,
    WaitsForCheckpoint,
    Wishes,
    WorkerInfo,
    Wrote,
)
from drawbar.train._orders import CollectiveDone, Order
from drawbar.train._serialization import serialize
from drawbar.train._storage.manifest import Manifest


class Attempt:
    """The state of one attempt.

    Args:
        number: Number of the attempt in its run.
        first_index: Number of the first report.
        workers: Where each rank's process is, in rank order.
        order: Gives one rank an order.
        emit: Tells events.
        should_emit_rounds: Whether complete rounds of metrics are told too.
        diagnose: Finds out where all ranks stand and tells the one that asked.
    """

    def __init__(
        self,
        *,
        number: int,
        run_id: str,
        first_index: int,
        workers: Sequence[WorkerInfo],
        order: Callable[[int, Order], None],
        emit: Emit,
        should_emit_rounds: bool,
        commits: CheckpointCommitter,
        validations: ValidationScheduler,
        on_diagnosis_request: Callable[[int, DiagnosisAsked], None],
    ) -> None:
        self.number = number
        self.workers = list(workers)
        self.finished: dict[int, Finished] = {}
        self.requests = Wishes()
        self._run_id = run_id
        self._order = order
        self._emit = emit
        self._tells_rounds = should_emit_rounds
        self._commits = commits
        self._diagnose = on_diagnosis_request
        self._progress = AttemptProgress(
            len(workers), first_index, should_keep_all_rounds=should_emit_rounds
        )
        self.checkpoint_queries = CheckpointQueries(self._progress, commits, validations, order)
        self._round_metrics: dict[int, list[dict[str, object]]] = {}
        # The patience of `over` counts from here on: the start before it has had its own time.
        self._last_activity = dict.fromkeys(range(len(workers)), time.monotonic())
        self._last_locations: dict[int, str] = {}  # of each rank's last report or collective
        self.batch_counts = BatchCountCheck(len(workers))
        self._ended = asyncio.Event()
        self._error: Exception | None = None
        self._failure_times: dict[int, float] = {}  # by rank: when its function did

    def on_messages(self, rank: int, messages: Sequence[Message]) -> None:
        """Take what a rank says, in its order. Never raises: `over` does."""
        for message in messages:
            if self._ended.is_set():
                self._handle_late_message(rank, message)
                continue
            try:
                self._handle_message(rank, message)
            except Exception as error:
                self.fail(error)

    def fail(self, error: Exception) -> bool:
        """End the attempt, and gather what ranks say of failures from now on.

        Returns:
            False if it was over before.
        """
        if self._ended.is_set():
            return False
        # Who had raised by then counts for the cause, though it has not told how.
        if isinstance(error, AttemptFailure):
            error.failure_times = self._failure_times
            error.returned = set(self.finished)
        self._error = error
        self._ended.set()
        return True

    def close(self) -> None:
        """Hear nothing any more."""
        # Without an error, nothing is gathered for its cause either.
        self._error = None
        self._ended.set()

    async def wait(self, timeout: float | None) -> bool:
        """Wait until every function has returned.

        Returns:
            False as soon as no rank has said anything for `patience` seconds, unless one stands
            still until validations have ended, which may take as long as they are given.

        Raises:
            AttemptFailure: A rank failed or died, or the ranks can never meet.
            OSError: The journal cannot be written.
        """
        while not self._ended.is_set():
            left = None
            if timeout is not None:
                left = max(self._last_activity.values()) + timeout - time.monotonic()
                if left <= 0 and not self.checkpoint_queries.is_waiting_for_validation:
                    return False
                # Somebody waits for a validation: look again when as much time has gone.
                left = left if left > 0 else timeout
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._ended.wait()
        if self._error is not None:
            raise self._error
        return True

    def _handle_late_message(self, rank: int, message: Message) -> None:
        match message:
            # Printed before the attempt ended, or while the function cleans up. Lines on stderr are
            # omitted: most are libraries' messages about lost peers, and the log has them. The
            # output of a script is complete instead, as under torchrun.
            case Printed(stream="stdout") | Wrote():
                self._emit_output(rank, message)
            case _ if isinstance(self._error, AttemptFailure):
                self._error.on_message(rank, message)

    def _emit_output(self, rank: int, message: Printed | Wrote) -> None:
        if isinstance(message, Printed):
            self._emit(LinePrinted(rank, message))
        else:
            self._emit(BytesWritten(message.data, message.stream))

    def _handle_message(self, rank: int, message: Message) -> None:
        """Take one message.

        Raises:
            AttemptFailure: As `over`.
        """
        # By the clock of this process: those of the nodes may differ.
        self._last_activity[rank] = time.monotonic()
        match message:
            case Reported():
                self._on_report(rank, message)
            case Printed() | Wrote():
                self._emit_output(rank, message)
            case SignOfLife():
                pass  # its time is all that it says
            case WaitsForCheckpoint():
                self._progress.on_waiting_for_checkpoint(rank, message.index)
                self._check_divergence()
            case Persisted():
                self._commits.on_persisted(rank, message)
            case FileSent():
                self._commits.on_chunk(rank, message, partial(self._order, rank))
            case FileAsked():
                self._commits.transfers.read_chunk(message, partial(self._order, rank))
            case CollectiveCalled():
                self._on_collective(rank, message)
            case CheckpointsAsked():
                self.checkpoint_queries.add(rank, message)
                self._check_divergence()
            case Discarded():
                self._commits.registry.discard(message.name)
            case PassEnded():
                self._on_epoch_ended(rank, message)
            case DiagnosisAsked():
                self._diagnose(rank, message)
            case FunctionRaised():
                self._failure_times[rank] = message.time
            case FunctionStarted():
                self._emit(UserFunctionStarted(time=message.time, attempt=self.number, rank=rank))
            case Finished():
                self.finished[rank] = message
                # A return value that does not pickle fails nothing: the training itself has gone
                # well.
                if message.value_error:
                    self._emit(Notice(f"rank {rank}: {message.value_error}"))
                self._progress.on_finished(rank)
                self.checkpoint_queries.reply_to_ready()
                self._check_divergence()
                if self.is_finished:
                    self._ended.set()
            case Failed():
                raise AttemptFailure(_get_end_cause(message.failure), [message.failure])
            case Gone():
                raise AttemptFailure("worker", deaths={rank: message})
            case Interrupted():
                raise AttemptFailure("worker", [describe_interruption(rank)])

    @property
    def is_finished(self) -> bool:
        """Whether the function has returned on every rank."""
        return len(self.finished) == len(self.workers)

    def on_draining_nodes(self, draining: Mapping[str, int]) -> PreemptionInfo | None:
        """Take note of nodes that go; gives what is new about this attempt's workers."""
        ranks: dict[str, list[int]] = {}
        for rank, worker in enumerate(self.workers):
            if worker.node_id in draining:
                ranks.setdefault(worker.node_id, []).append(rank)
        # 0 is no deadline.
        deadlines = [draining[node] for node in ranks if draining[node]]
        info = PreemptionInfo(min(deadlines, default=None), ranks)
        # The same nodes are found again every two seconds, and are said once.
        if not ranks or info == self.requests.preemption:
            return None
        self.requests = Wishes(checkpoint=True, preemption=info)
        return info

    def request_checkpoint(self) -> None:
        """Have `should_checkpoint()` say yes."""
        self.requests = replace(self.requests, checkpoint=True)

    def get_activity(self) -> dict[int, RankActivity]:
        """Give the last sign of life of each rank that has not finished."""
        now = time.monotonic()
        return {
            rank: self._progress.get_activity(rank, now - heard, self._last_locations.get(rank, ""))
            for rank, heard in self._last_activity.items()
            if rank not in self.finished
        }

    def get_final_notices(self) -> list[str]:
        """List what ranks have to say of an attempt that went well, each thing once."""
        said = (remark for _, value in sorted(self.finished.items()) for remark in value.remarks)
        return list(dict.fromkeys(said))

    def count_reports(self, rank: int) -> int:
        """How often a rank has reported in this attempt."""
        return self._progress.ranks[rank].reports - self._progress.first_index

    def on_committed(self, manifest: Manifest, command: Order) -> None:
        """Take note of a commit and tell every rank."""
        self._progress.on_committed(manifest.index)
        for rank in range(len(self.workers)):
            # A rank that has returned would drop it, and on Ray an order costs a call.
            if rank not in self.finished:
                self._order(rank, command)
        self.checkpoint_queries.reply_to_ready()
        metrics = self._round_metrics.pop(manifest.index, None)
        if metrics is not None:
            checkpoint = self._commits.registry.get_checkpoint(manifest)
            self._emit(RoundCompleted(manifest.index, metrics, checkpoint))

    def _on_report(self, rank: int, report: Reported) -> None:
        self._emit(
            ReportReceived(
                time=report.time,
                attempt=self.number,
                rank=rank,
                index=report.index,
                metrics=report.metrics,
            )
        )
        self._last_locations[rank] = report.where
        # Only what is handed over and not waited for can be lost to the user without their
        # noticing.
        if report.offer is not None and report.offer.handed_over and not report.waits:
            self._commits.moved_files.add(
                report.index,
                rank,
                node=self.workers[rank].hostname,
                directory=report.offer.directory,
            )
        for complete in self._progress.on_report(rank, report):
            if conflict := complete.find_conflict():
                raise AttemptFailure("divergence", [describe_divergence(conflict)])
            if self._tells_rounds:
                # Kept until the commit, so that a callback is never given a checkpoint that is not
                # there.
                metrics = [complete.reports[each].metrics for each in sorted(complete.reports)]
                if complete.offers:
                    self._round_metrics[complete.index] = metrics
                else:
                    self._emit(RoundCompleted(complete.index, metrics, None))
            self._commits.start(
                complete,
                run_id=self._run_id,
                attempt=self.number,
                world_size=len(self.workers),
                send_command=self._order,
            )
        self.checkpoint_queries.reply_to_ready()
        if report.offer is not None:
            self._check_divergence()

    def _on_epoch_ended(self, rank: int, passed: PassEnded) -> None:
        self._emit(
            DatasetEpochEnded(time=time.time(), attempt=self.number, rank=rank, shard_epoch=passed)
        )
        try:
            if text := self.batch_counts.add(rank, passed):
                self._emit(Notice(text))
        except ValueError as error:
            raise AttemptFailure("configuration", exception=error) from error

    def _on_collective(self, rank: int, call: CollectiveCalled) -> None:
        self._last_locations[rank] = call.where
        calls = self._progress.on_collective(rank, call)
        if calls is None:
            self._check_divergence()
            return
        # Passed on as they are: only ranks unpack what users made.
        payloads = tuple(calls[each].payload for each in sorted(calls))
        if call.kind == "wishes":
            payloads = (serialize(self.requests),)
        # Only rank 0 has packed anything; the others would be sent a list of None.
        if call.kind == "broadcast_from_rank_zero":
            payloads = payloads[:1]
        for each in calls:
            self._order(each, CollectiveDone(sequence=call.sequence, payloads=payloads))

    def _check_divergence(self) -> None:
        reason = self._progress.find_divergence()
        if reason is not None:
            raise AttemptFailure("divergence", [describe_divergence(reason)])


def _get_end_cause(failure: WorkerFailure) -> AttemptEndCause:
    match failure.kind:
        case "configuration" | "storage":
            return failure.kind
        case _:
            return "worker"
