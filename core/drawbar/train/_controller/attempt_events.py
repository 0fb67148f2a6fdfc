"""Emit events for messages of the ranks of an attempt: reports and observations."""

from __future__ import annotations

from collections.abc import Sequence

from drawbar._base.wording import escape_surrogates
from drawbar._records.event_stream import Emit
from drawbar._records.events import FirstReportReceived, ReportLocationFound
from drawbar._records.live_events import Event, Notice, ObservationReceived, ReportsReceived
from drawbar.train._protocol.messages import Observation, Report

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

    def emit(self, rank: int, reports: Sequence[Report]) -> None:
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


def make_observation_event(attempt: int, rank: int, observation: Observation) -> Event:
    """Return the event for something that a rank has observed."""
    return ObservationReceived(attempt, rank, observation.kind, observation.payload)
