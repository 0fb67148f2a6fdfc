"""Emit events for messages of the ranks of an attempt: reports and observations."""

from __future__ import annotations

import time
from collections.abc import Sequence

from drawbar._base.wording import escape_surrogates
from drawbar._process.output_lines import OutputLine
from drawbar._records.event_stream import Emit
from drawbar._records.events import (
    DatasetEpochEnded,
    FirstReportReceived,
    ProgramStarted,
    ReportLocationFound,
    ShardEpochEnded,
    UserFunctionStarted,
)
from drawbar._records.live_events import (
    BytesWritten,
    Event,
    LinePrinted,
    Notice,
    ObservationReceived,
    RankImported,
    ReportsReceived,
)
from drawbar.train._protocol import messages

_MAX_LOCATIONS = 32

_UNREAD_CHECKPOINT = (
    "The training function has reported a checkpoint, but it has not read {name}, from which it "
    "resumes. To continue after a restart instead of starting again, load train.get_checkpoint() "
    "or call the load_state() of your framework before you train."
)


class ReportEmitter:
    """Emit the reports of an attempt.

    Args:
        attempt: Number of the attempt.
        emit: Callback that publishes events.

    Attributes:
        num_reports: Number of emitted reports of all ranks.
    """

    def __init__(self, attempt: int, emit: Emit) -> None:
        self.num_reports = 0
        self._attempt = attempt
        self._emit = emit
        self._locations = set[str]()

    def emit(self, rank: int, reports: Sequence[messages.Report]) -> None:
        """Emit consecutive reports of a rank.

        Raises:
            OSError: The reports cannot be written.
        """
        if not self.num_reports:
            self._emit(FirstReportReceived(time=reports[0].time, attempt=self._attempt, rank=rank))
        self.num_reports += len(reports)
        self._emit(
            ReportsReceived(
                attempt=self._attempt,
                rank=rank,
                indices=[report.index for report in reports],
                times=[report.time for report in reports],
                metrics=[report.metrics for report in reports],
            )
        )
        for report in reports:
            if report.unread_checkpoint:
                self._emit(Notice(_UNREAD_CHECKPOINT.format(name=report.unread_checkpoint)))
            if report.location not in self._locations and len(self._locations) < _MAX_LOCATIONS:
                self._locations.add(report.location)
                self._emit(
                    ReportLocationFound(
                        time=report.time,
                        attempt=self._attempt,
                        rank=rank,
                        location=escape_surrogates(report.location),
                    )
                )


EmittedMessage = (
    OutputLine
    | messages.OutputBytes
    | messages.Observation
    | ShardEpochEnded
    | messages.FunctionImported
    | messages.FunctionStarted
    | messages.ProgramStarted
)


def make_event(attempt: int, rank: int, message: EmittedMessage) -> Event:
    """Return the event for a message that watchers receive."""
    match message:
        case OutputLine():
            return LinePrinted(rank, message)
        case messages.OutputBytes():
            return BytesWritten(message.data, message.stream)
        case messages.Observation():
            return ObservationReceived(attempt, rank, message.kind, message.payload)
        case ShardEpochEnded():
            return DatasetEpochEnded(
                time=time.time(), attempt=attempt, rank=rank, shard_epoch=message
            )
        case messages.FunctionImported():
            return RankImported(rank)
        case messages.FunctionStarted():
            return UserFunctionStarted(time=message.time, attempt=attempt, rank=rank)
        case messages.ProgramStarted():
            return ProgramStarted(time=time.time(), attempt=attempt, rank=rank, pid=message.pid)
