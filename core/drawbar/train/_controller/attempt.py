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

from drawbar.train._carry import carry
from drawbar.train._controller.attempt_failed import AttemptFailed
from drawbar.train._controller.commits import Committer
from drawbar.train._controller.failures import describe_divergence, describe_interruption
from drawbar.train._controller.passes import Passes
from drawbar.train._controller.progress import Progress, Sign
from drawbar.train._controller.questions import Questions
from drawbar.train._controller.validations import Validations
from drawbar.train._errors import WorkerFailure
from drawbar.train._history.events import (
    AttemptEnd,
    BytesWritten,
    DatasetPassEnded,
    LinePrinted,
    Notice,
    ReportReceived,
    RoundReported,
    UserFunctionStarted,
)
from drawbar.train._history.stream import Emit
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
from drawbar.train._storage.manifest import Manifest


class Attempt:
    """The state of one attempt.

    Args:
        number: Number of the attempt in its run.
        first_index: Number of the first report.
        workers: Where each rank's process is, in rank order.
        order: Gives one rank an order.
        emit: Tells events.
        tells_rounds: Whether complete rounds of metrics are told too.
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
        tells_rounds: bool,
        commits: Committer,
        validations: Validations,
        diagnose: Callable[[int, DiagnosisAsked], None],
    ) -> None:
        self.number = number
        self.workers = list(workers)
        self.values: dict[int, Finished] = {}
        self.wishes = Wishes()
        self._run_id = run_id
        self._order = order
        self._emit = emit
        self._tells_rounds = tells_rounds
        self._commits = commits
        self._diagnose = diagnose
        self._progress = Progress(len(workers), first_index, keep_all_rounds=tells_rounds)
        self.questions = Questions(self._progress, commits, validations, order)
        self._metrics: dict[int, list[dict[str, object]]] = {}
        # The patience of `over` counts from here on: the start before it has had its own time.
        self._heard = dict.fromkeys(range(len(workers)), time.monotonic())
        self._lines: dict[int, str] = {}  # of each rank's last report or collective
        self.passes = Passes(len(workers))
        self._is_over = asyncio.Event()
        self._error: Exception | None = None
        self._raised: dict[int, float] = {}  # by rank: when its function did

    def hear(self, rank: int, messages: Sequence[Message]) -> None:
        """Take what a rank says, in its order. Never raises: `over` does."""
        for message in messages:
            if self._is_over.is_set():
                self._hear_late(rank, message)
                continue
            try:
                self._receive(rank, message)
            except Exception as error:
                self.fail(error)

    def fail(self, error: Exception) -> bool:
        """End the attempt, and gather what ranks say of failures from now on.

        Returns:
            False if it was over before.
        """
        if self._is_over.is_set():
            return False
        # Who had raised by then counts for the cause, though it has not told how.
        if isinstance(error, AttemptFailed):
            error.raised = self._raised
            error.returned = set(self.values)
        self._error = error
        self._is_over.set()
        return True

    def close(self) -> None:
        """Hear nothing any more."""
        # Without an error, nothing is gathered for its cause either.
        self._error = None
        self._is_over.set()

    async def over(self, patience: float | None) -> bool:
        """Wait until every function has returned.

        Returns:
            False as soon as no rank has said anything for `patience` seconds, unless one stands
            still until validations have ended, which may take as long as they are given.

        Raises:
            AttemptFailed: A rank failed or died, or the ranks can never meet.
            OSError: The journal cannot be written.
        """
        while not self._is_over.is_set():
            left = None
            if patience is not None:
                left = max(self._heard.values()) + patience - time.monotonic()
                if left <= 0 and not self.questions.await_validation:
                    return False
                # Somebody waits for a validation: look again when as much time has gone.
                left = left if left > 0 else patience
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._is_over.wait()
        if self._error is not None:
            raise self._error
        return True

    def _hear_late(self, rank: int, message: Message) -> None:
        match message:
            # Printed before the attempt ended, or while the function cleans up. Lines on stderr are
            # omitted: most are libraries' messages about lost peers, and the log has them. The
            # output of a script is complete instead, as under torchrun.
            case Printed(stream="stdout") | Wrote():
                self._show(rank, message)
            case _ if isinstance(self._error, AttemptFailed):
                self._error.hear(rank, message)

    def _show(self, rank: int, message: Printed | Wrote) -> None:
        if isinstance(message, Printed):
            self._emit(LinePrinted(rank, message))
        else:
            self._emit(BytesWritten(message.data, message.stream))

    def _receive(self, rank: int, message: Message) -> None:
        """Take one message.

        Raises:
            AttemptFailed: As `over`.
        """
        # By the clock of this process: those of the nodes may differ.
        self._heard[rank] = time.monotonic()
        match message:
            case Reported():
                self._reported(rank, message)
            case Printed() | Wrote():
                self._show(rank, message)
            case SignOfLife():
                pass  # its time is all that it says
            case WaitsForCheckpoint():
                self._progress.waits(rank, message.index)
                self._check_divergence()
            case Persisted():
                self._commits.persisted(rank, message)
            case FileSent():
                self._commits.take(rank, message, partial(self._order, rank))
            case FileAsked():
                self._commits.pieces.read(message, partial(self._order, rank))
            case CollectiveCalled():
                self._called(rank, message)
            case CheckpointsAsked():
                self.questions.ask(rank, message)
                self._check_divergence()
            case Discarded():
                self._commits.kept.discard(message.name)
            case PassEnded():
                self._passed(rank, message)
            case DiagnosisAsked():
                self._diagnose(rank, message)
            case FunctionRaised():
                self._raised[rank] = message.time
            case FunctionStarted():
                self._emit(UserFunctionStarted(time=message.time, attempt=self.number, rank=rank))
            case Finished():
                self.values[rank] = message
                # A return value that does not pickle fails nothing: the training itself has gone
                # well.
                if message.value_error:
                    self._emit(Notice(f"rank {rank}: {message.value_error}"))
                self._progress.finished(rank)
                self.questions.answer()
                self._check_divergence()
                if self.finished:
                    self._is_over.set()
            case Failed():
                raise AttemptFailed(_end_by(message.failure), [message.failure])
            case Gone():
                raise AttemptFailed("worker", gone={rank: message})
            case Interrupted():
                raise AttemptFailed("worker", [describe_interruption(rank)])

    @property
    def finished(self) -> bool:
        """Whether the function has returned on every rank."""
        return len(self.values) == len(self.workers)

    def preempted(self, draining: Mapping[str, int]) -> PreemptionInfo | None:
        """Take note of nodes that go; gives what is new about this attempt's workers."""
        ranks: dict[str, list[int]] = {}
        for rank, worker in enumerate(self.workers):
            if worker.node_id in draining:
                ranks.setdefault(worker.node_id, []).append(rank)
        # 0 is no deadline.
        deadlines = [draining[node] for node in ranks if draining[node]]
        info = PreemptionInfo(min(deadlines, default=None), ranks)
        # The same nodes are found again every two seconds, and are said once.
        if not ranks or info == self.wishes.preemption:
            return None
        self.wishes = Wishes(checkpoint=True, preemption=info)
        return info

    def request_checkpoint(self) -> None:
        """Have `checkpoint_requested()` say yes."""
        self.wishes = replace(self.wishes, checkpoint=True)

    def signs(self) -> dict[int, Sign]:
        """Give the last sign of life of each rank that has not finished."""
        now = time.monotonic()
        return {
            rank: self._progress.sign_of(rank, now - heard, self._lines.get(rank, ""))
            for rank, heard in self._heard.items()
            if rank not in self.values
        }

    def remarks(self) -> list[str]:
        """List what ranks have to say of an attempt that went well, each thing once."""
        said = (remark for _, value in sorted(self.values.items()) for remark in value.remarks)
        return list(dict.fromkeys(said))

    def reports_of(self, rank: int) -> int:
        """How often a rank has reported in this attempt."""
        return self._progress.ranks[rank].reports - self._progress.first_index

    def committed(self, manifest: Manifest, order: Order) -> None:
        """Take note of a commit and tell every rank."""
        self._progress.committed(manifest.index)
        for rank in range(len(self.workers)):
            # A rank that has returned would drop it, and on Ray an order costs a call.
            if rank not in self.values:
                self._order(rank, order)
        self.questions.answer()
        metrics = self._metrics.pop(manifest.index, None)
        if metrics is not None:
            checkpoint = self._commits.kept.checkpoint(manifest)
            self._emit(RoundReported(manifest.index, metrics, checkpoint))

    def _reported(self, rank: int, report: Reported) -> None:
        self._emit(
            ReportReceived(
                time=report.time,
                attempt=self.number,
                rank=rank,
                index=report.index,
                metrics=report.metrics,
            )
        )
        self._lines[rank] = report.where
        # Only what is handed over and not waited for can be lost to the user without their
        # noticing.
        if report.offer is not None and report.offer.handed_over and not report.waits:
            self._commits.handed_over.note(
                report.index,
                rank,
                node=self.workers[rank].hostname,
                directory=report.offer.directory,
            )
        for complete in self._progress.reported(rank, report):
            if conflict := complete.conflict():
                raise AttemptFailed("divergence", [describe_divergence(conflict)])
            if self._tells_rounds:
                # Kept until the commit, so that a callback is never given a checkpoint that is not
                # there.
                metrics = [complete.reports[each].metrics for each in sorted(complete.reports)]
                if complete.offers:
                    self._metrics[complete.index] = metrics
                else:
                    self._emit(RoundReported(complete.index, metrics, None))
            self._commits.begin(
                complete,
                run_id=self._run_id,
                attempt=self.number,
                world_size=len(self.workers),
                order=self._order,
            )
        self.questions.answer()
        if report.offer is not None:
            self._check_divergence()

    def _passed(self, rank: int, passed: PassEnded) -> None:
        self._emit(
            DatasetPassEnded(time=time.time(), attempt=self.number, rank=rank, passed=passed)
        )
        try:
            if text := self.passes.note(rank, passed):
                self._emit(Notice(text))
        except ValueError as error:
            raise AttemptFailed("configuration", cause=error) from error

    def _called(self, rank: int, call: CollectiveCalled) -> None:
        self._lines[rank] = call.where
        calls = self._progress.called(rank, call)
        if calls is None:
            self._check_divergence()
            return
        # Passed on as they are: only ranks unpack what users made.
        payloads = tuple(calls[each].payload for each in sorted(calls))
        if call.kind == "wishes":
            payloads = (carry(self.wishes),)
        # Only rank 0 has packed anything; the others would be sent a list of None.
        if call.kind == "broadcast_from_rank_zero":
            payloads = payloads[:1]
        for each in calls:
            self._order(each, CollectiveDone(sequence=call.sequence, payloads=payloads))

    def _check_divergence(self) -> None:
        reason = self._progress.divergence()
        if reason is not None:
            raise AttemptFailed("divergence", [describe_divergence(reason)])


def _end_by(failure: WorkerFailure) -> AttemptEnd:
    match failure.kind:
        case "configuration" | "storage":
            return failure.kind
        case _:
            return "worker"
