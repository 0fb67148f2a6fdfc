"""Emit events for messages of the ranks of an attempt: reports, progress, and times."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from drawbar._base.wording import escape_surrogates
from drawbar._observe.rank_times import (
    MIN_STRAGGLER_STEPS,
    RANK_TIMES_FILE,
    RankTimesOfRank,
    encode_line,
    find_stragglers,
    subtract,
)
from drawbar._records.event_stream import Emit
from drawbar._records.events import (
    FirstReportReceived,
    ProgressRecorded,
    RankTimesRecorded,
    ReportLocationFound,
    StragglerFound,
)
from drawbar._records.live_events import Notice, ProgressReceived, ReportsReceived
from drawbar._records.run_progress import RateWindow, RunProgress
from drawbar.train._protocol.messages import ProgressSet, RankTimes, Report

_MAX_LOCATIONS = 32
RECORD_INTERVAL_S = 30.0
_MIN_INTERVAL_S = 10.0
_MAX_NOTICES = 10

_UNREAD_CHECKPOINT = (
    "The training function has reported a checkpoint, but it has not read {name}, from which it "
    "resumes. To continue after a restart instead of starting again, load train.get_checkpoint() "
    "or call the load_state() of your framework before you train."
)

_logger = logging.getLogger("drawbar.train")


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


class ProgressRecorder:
    """Progress of one attempt.

    The rate counts only this attempt, so steps that are repeated after a restart count once.

    Args:
        attempt: Number of the attempt.
        emit: Callback that publishes events.
    """

    def __init__(self, attempt: int, emit: Emit) -> None:
        self._attempt = attempt
        self._emit = emit
        self._rate = RateWindow()
        self._progress: RunProgress | None = None
        self._recorded: RunProgress | None = None
        self._next_record = 0.0

    def on_progress(self, message: ProgressSet) -> None:
        """Emit the progress that a rank has sent."""
        self._rate.add(message.time, message.done)
        self._progress = RunProgress(
            done=message.done,
            total=message.total,
            unit=message.unit,
            time=message.time,
            rate=self._rate.get_rate(),
        )
        self._emit(ProgressReceived(self._progress))
        if time.monotonic() >= self._next_record:
            self.record()

    def record(self) -> None:
        """Store the latest progress in the journal, unless it is stored."""
        progress = self._progress
        if progress is None or progress is self._recorded:
            return
        self._recorded = progress
        self._next_record = time.monotonic() + RECORD_INTERVAL_S
        self._emit(ProgressRecorded(time=time.time(), attempt=self._attempt, progress=progress))


class RankTimesRecorder:
    """Times of the ranks of one attempt.

    Args:
        attempt: Number of the attempt.
        directory: Run directory on this node.
        emit: Callback that publishes events.
    """

    def __init__(self, attempt: int, directory: Path, emit: Emit) -> None:
        self._attempt = attempt
        self._path = directory / RANK_TIMES_FILE
        self._emit = emit
        self._ranks: dict[int, RankTimes] = {}
        # Sums over the ranks, so that a commit costs the same with any number of ranks.
        self._sums = Counter[str]()
        self._is_recorded = True
        self._start = time.monotonic()
        self._next_line = 0.0
        self._can_write = True
        self._found = set[tuple[int, str]]()
        # Stragglers are searched between this time and now, so that a rank that becomes slow in a
        # long attempt is found, too.
        self._compared: dict[int, RankTimesOfRank] = {}

    def add(self, rank: int, times: RankTimes) -> None:
        """Update the times of a rank, and write a line for all ranks if one is due."""
        previous = self._ranks.get(rank)
        if previous is not None:
            self._sums.subtract(previous.seconds)
        self._sums.update(times.seconds)
        self._ranks[rank] = times
        self._is_recorded = False
        now = time.monotonic()
        if now >= self._next_line and len(self._ranks) > 1:
            # Longer intervals in longer attempts bound the size of the file.
            self._next_line = now + max(_MIN_INTERVAL_S, (now - self._start) / 100)
            self._write_line()

    def record(self) -> None:
        """Emit the averages over the ranks, if they have changed."""
        if self._is_recorded:
            return
        self._is_recorded = True
        count = len(self._ranks)
        self._emit(
            RankTimesRecorded(
                time=time.time(),
                attempt=self._attempt,
                seconds={key: max(value / count, 0.0) for key, value in self._sums.items()},
                steps=min(times.steps for times in self._ranks.values()),
            )
        )

    def end(self) -> None:
        """Record the last times of the attempt."""
        if not self._is_recorded:
            # If the user has deleted the run directory, the error of the run is the next event's.
            with contextlib.suppress(FileNotFoundError):
                self._write_line()
                self.record()

    def _write_line(self) -> None:
        self._warn_about_stragglers()
        if not self._can_write:
            return
        line = encode_line(time.time(), self._attempt, self._ranks)
        try:
            with open(self._path, "ab") as file:
                file.write(line)
        except OSError as error:
            self._can_write = False
            if not isinstance(error, FileNotFoundError):
                _logger.warning("Times of the ranks are not recorded: %s", error)

    def _warn_about_stragglers(self) -> None:
        ranks = {
            rank: RankTimesOfRank(times.steps, times.seconds) for rank, times in self._ranks.items()
        }
        changes = subtract(ranks, self._compared)
        if min((times.steps for times in changes.values()), default=0) < MIN_STRAGGLER_STEPS:
            return
        self._compared = ranks
        for straggler in find_stragglers(changes):
            key = straggler.rank, straggler.part
            if key in self._found:
                continue
            self._found.add(key)
            self._emit(
                StragglerFound(
                    time=time.time(),
                    attempt=self._attempt,
                    rank=straggler.rank,
                    part=straggler.part,
                    ratio=straggler.ratio,
                    seconds_per_step=straggler.seconds_per_step,
                )
            )
            if len(self._found) <= _MAX_NOTICES:
                self._emit(Notice(f"{straggler.describe()} (drawbar show --ranks)"))
