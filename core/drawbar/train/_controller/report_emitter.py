"""Emit consecutive reports of a rank as one event, so that they are written together.

They are written before anything else that users or ranks can observe about them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import FirstReportReceived, ReportLocationFound
from drawbar.train._history.live_events import Event, ReportsReceived
from drawbar.train._protocol.commands import Command
from drawbar.train._protocol.messages import Report
from drawbar.train._wording import escape_surrogates

_MAX_LOCATIONS = 32


class ReportEmitter:
    """Collect reports of an attempt until they are emitted.

    Args:
        attempt: Number of the attempt.
        emit: Callback that publishes events.
        send_command: Sends a command to one rank.
        broadcast_command: Sends a command to several ranks.

    Attributes:
        num_reports: Number of emitted reports of all ranks.
    """

    def __init__(
        self,
        attempt: int,
        emit: Emit,
        send_command: Callable[[int, Command], None],
        broadcast_command: Callable[[Collection[int], Command], None],
    ) -> None:
        self.num_reports = 0
        self._attempt = attempt
        self._emit = emit
        self._send_command = send_command
        self._broadcast_command = broadcast_command
        self._rank = 0
        self._locations = set[str]()
        self._reports: list[Report] = []

    def add(self, rank: int, report: Report) -> None:
        """Add a report of the same rank as the other collected reports."""
        self._rank = rank
        self._reports.append(report)

    def emit_after_reports(self, event: Event) -> None:
        """Emit the collected reports, and then another event."""
        self.flush()
        self._emit(event)

    def send_after_reports(self, rank: int, command: Command) -> None:
        """Emit the collected reports, and then send a command to a rank."""
        self.flush()
        self._send_command(rank, command)

    def broadcast_after_reports(self, ranks: Collection[int], command: Command) -> None:
        """Emit the collected reports, and then send a command to several ranks."""
        self.flush()
        self._broadcast_command(ranks, command)

    def flush(self) -> None:
        """Emit the collected reports.

        Raises:
            OSError: The reports cannot be written.
        """
        reports, self._reports = self._reports, []
        if not reports:
            return
        if not self.num_reports:
            self._emit(
                FirstReportReceived(time=reports[0].time, attempt=self._attempt, rank=self._rank)
            )
        self.num_reports += len(reports)
        self._emit(
            ReportsReceived(
                attempt=self._attempt,
                rank=self._rank,
                indices=[report.index for report in reports],
                times=[report.time for report in reports],
                metrics=[report.metrics for report in reports],
            )
        )
        for report in reports:
            if report.location not in self._locations and len(self._locations) < _MAX_LOCATIONS:
                self._locations.add(report.location)
                self._emit(
                    ReportLocationFound(
                        time=report.time,
                        attempt=self._attempt,
                        rank=self._rank,
                        location=escape_surrogates(report.location),
                    )
                )

    def try_flush(self, on_error: Callable[[Exception], object]) -> None:
        """Emit the collected reports, and pass an error to a callback."""
        try:
            self.flush()
        except Exception as error:
            on_error(error)
