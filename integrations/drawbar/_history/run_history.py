"""`RunHistory`: events and reports of a run, as its directory has them."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from drawbar._base.metrics import Metrics, flatten
from drawbar._process.errors import DamagedRunError, UnsupportedFormatError
from drawbar._records.events import CheckpointCommitted, JournaledEvent
from drawbar._records.journal import (
    decode_events,
    decode_readable_events,
    make_journal_lost_error,
    replay,
)
from drawbar._records.report_blocks import ReportBlock
from drawbar._records.report_ranges import (
    AttemptReports,
    describe_missing,
    find_missing_reports,
    get_validation_metrics,
    list_attempt_reports,
    make_run_state,
)
from drawbar._records.stored_reports import StoredReports
from drawbar._records.timeline import RunState
from drawbar._storage.report_files import Segment
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.storage_path import suggest_remote

REPORT_COLUMNS = ("rank", "index", "attempt", "time")
"""Columns of a table of reports, before the metrics."""

SAMPLED_REPORTS = 100_000
"""Number of reports from which on sampled curves do not have all of them."""

SAMPLED_VALUES = 1_000_000
"""Number of metric values from which on sampled curves do not have all of them."""


@dataclass(frozen=True)
class RunHistory:
    """Events and reports of a run in progress or ended.

    An attempt that starts at report k replaces report k and all later reports of earlier attempts.
    The methods return only reports that no later attempt has replaced. Only the necessary segments
    are read.

    Attributes:
        events: Events of the journal.
        reports: Reports in the segments.
    """

    events: Sequence[JournaledEvent]
    reports: StoredReports

    @classmethod
    def read(cls, directory: RunDirectory) -> RunHistory:
        """Read the history of an ended or active run without writing any file.

        Raises:
            FileNotFoundError: There is no run.
            DamagedRunError: The journal cannot be read, was truncated, or is lost although
                checkpoints exist, or reports are missing.
        """
        # List them before the journal is read, because an active run may commit other checkpoints
        # in the meantime. In an object store, the journal is uploaded after each commit, so the
        # latest commit may not be in it yet.
        names = directory.checkpoints.names() if directory.remote_path is None else []
        data = directory.run_files.read_journal()
        path = directory.root / directory.journal_path.name
        events = list(decode_events(io.BytesIO(data or b""), path))
        if not events and (manifests := directory.checkpoints.list_committed()):
            raise make_journal_lost_error(path, manifests[-1].name)
        if data is None:
            raise _make_no_run_error(directory)
        history = cls(events, StoredReports(directory.run_files))
        history.require_complete(names, directory)
        return history

    @classmethod
    def read_readable(cls, directory: RunDirectory) -> tuple[RunHistory, str]:
        """Read as much as possible of the history of a run that may be damaged.

        A journal on this machine that cannot be opened is reported as damage.

        Returns:
            The history, and a description of the parts that could not be read, or "".

        Raises:
            FileNotFoundError: There is no run.
            OSError: The storage cannot be read.
        """
        reports = StoredReports(directory.run_files, strict=False)
        try:
            data = directory.run_files.read_journal()
        except (OSError, DamagedRunError) as error:
            # An error of remote storage does not mean that the run is damaged. An error of an
            # existing local file does.
            is_mounted = directory.remote_path is None and os.path.isdir(directory.local_path)
            if isinstance(error, OSError) and not is_mounted:
                raise
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            return cls((), reports), f"the journal cannot be read: {reason}"
        if data is None and not any(directory.checkpoints.list_readable()):
            raise _make_no_run_error(directory)
        path = directory.root / directory.journal_path.name
        try:
            events, unreadable = decode_readable_events(data or b"", path)
        except UnsupportedFormatError as error:
            return cls((), reports), str(error)
        if not events:
            return cls((), reports), "the journal is empty or missing"
        lines = ", ".join(map(str, unreadable[:5])) + (", ..." if len(unreadable) > 5 else "")
        damage = [f"the journal cannot be read in line {lines}"] if unreadable else []
        history = cls(events, reports)
        _ = history.last_time  # reads only the last segment, and records its damage
        return history, "; ".join([*damage, *reports.damage.values()])

    @classmethod
    def read_local_or_remote(cls, directory: RunDirectory) -> RunHistory:
        """Read the local journal if it exists; an ended remote run has one only in the storage.

        Only the process that controls the run calls this, so the local journal is not checked.
        """
        if directory.journal_path.exists():
            events = list(replay(directory.journal_path))
            return cls(events, StoredReports(directory.run_files))
        return cls.read(directory)

    def require_complete(self, checkpoint_names: Iterable[str], directory: RunDirectory) -> None:
        """Check that no report is missing.

        Args:
            checkpoint_names: Names of the run's checkpoints.
            directory: The run's directory.

        Raises:
            DamagedRunError: Reports are missing.
        """
        journaled = {event.name for event in self.events if isinstance(event, CheckpointCommitted)}
        unknown = [name for name in checkpoint_names if name not in journaled]
        manifests = directory.checkpoints.list_committed(unknown) if unknown else []
        if missing := find_missing_reports(self.events, self.reports, manifests):
            reason = (
                f"although {missing[0].checkpoint} was committed after them"
                if missing[0].checkpoint
                else "although the run has recorded later ones"
            )
            raise DamagedRunError(
                f"In {directory.uri}, {describe_missing(missing)} are missing, "
                f'{reason}. The checkpoints are not affected; fit() with resume="auto" resumes '
                "from the newest intact one and records in the journal which reports are missing."
            )

    # -- last reports

    @cached_property
    def state(self) -> RunState:
        """State of the run after its last event, without metrics."""
        return RunState.from_events(self.events)

    def make_state(self) -> RunState:
        """Return the state of the run after its last event and report."""
        # A new object: the controller of a resumed run applies further events to it.
        return make_run_state(self.events, self.reports)

    @property
    def last_time(self) -> float | None:
        """Time of the last event or report, in seconds since the epoch; None without events."""
        if not self.events:
            return None
        last = self.reports.get_last(self._attempts[-1].attempt) if self._attempts else {}
        return max(self.events[-1].time, *(block.time[-1] for block in last.values()), 0.0)

    @property
    def last_metrics(self) -> Metrics | None:
        """Metrics of the last report of the lowest rank, with the validation metrics."""
        lowest = self.lowest_rank
        for attempt in reversed(self._current_attempts):
            if (block := self._find_last(attempt, lowest)) is not None:
                return {
                    **block.get_metrics(-1),
                    **self.validation_metrics.get(block.indices[-1], {}),
                }
        return None

    @cached_property
    def lowest_rank(self) -> int:
        """Lowest rank that has reported; 0 without reports."""
        lowest: int | None = None
        for attempt in reversed(self._current_attempts):
            if lowest == 0:
                break
            if last := self.reports.get_last(attempt.attempt):
                lowest = min(last) if lowest is None else min(lowest, *last)
        return lowest or 0

    def _find_last(self, attempt: AttemptReports, rank: int) -> ReportBlock | None:
        """Return a block that ends with the last report of a rank in an attempt."""
        last = self.reports.get_last(attempt.attempt).get(rank)
        if last is None:
            return None
        if selected := list(attempt.select(last)):
            return selected[-1]
        # A later attempt has replaced the last report. Search for the last one before it.
        for segment in reversed(self.reports.list_segments(attempt.attempt)):
            ranges = self.reports.get_summary(segment).ranges.get(rank, [])
            if any(first < attempt.end for first, _ in ranges):
                (blocks,) = self.reports.read_blocks([segment], rank)
                selected = [part for block in blocks for part in attempt.select(block)]
                if selected:
                    return max(selected, key=lambda block: block.indices[-1])
        return None

    # -- all reports

    @cached_property
    def _attempts(self) -> list[AttemptReports]:
        return list_attempt_reports(self.events)

    @cached_property
    def _current_attempts(self) -> list[AttemptReports]:
        """Attempts of which reports are part of the history."""
        return [attempt for attempt in self._attempts if attempt.ranges]

    @cached_property
    def validation_metrics(self) -> dict[int, Metrics]:
        """Validation metrics of checkpoints by report number, for the report of the lowest rank.

        If they were added to all ranks, a sum over all reports would include them repeatedly.
        """
        return get_validation_metrics(self.events)

    def count_stored(self) -> int:
        """Return the number of reports in the segments from which the history is read."""
        return sum(
            self.reports.count_reports(attempt.attempt) for attempt in self._current_attempts
        )

    def iter_blocks(self, rank: int | None = None) -> Iterator[tuple[int, ReportBlock]]:
        """Yield the number of the attempt and a block of reports, roughly in order.

        Args:
            rank: Rank whose reports are read. Default: all ranks.
        """
        for attempt in self._current_attempts:
            segments = self.reports.list_segments(attempt.attempt)
            for blocks in self.reports.read_blocks(segments, rank):
                for block in blocks:
                    for selected in attempt.select(block):
                        yield attempt.attempt, selected

    def iter_sampled_blocks(self) -> Iterator[ReportBlock]:
        """Yield reports of the lowest rank: all of a short run, and some of a long one."""
        rank = self.lowest_rank
        count = self.count_stored()
        num_values = count * len(self.last_metrics or ())
        if count <= SAMPLED_REPORTS and num_values <= SAMPLED_VALUES:
            yield from (block for _, block in self.iter_blocks(rank))
            return
        for attempt in self._current_attempts:
            for segment in self.reports.list_segments(attempt.attempt):
                if segment.end is None:
                    (blocks,) = self.reports.read_blocks([segment], rank)
                else:
                    blocks = self.reports.get_summary(segment).sample
                for block in blocks:
                    if block.rank == rank:
                        yield from attempt.select(block)

    def iter_rows(self) -> Iterator[Metrics]:
        """Yield all reports as rows of a table, sorted by report and rank.

        The reports of a few segments are in memory at the same time: as many as one rank is behind
        another one.
        """
        validated = dict(self.validation_metrics)
        for attempt in self._current_attempts:
            segments = self.reports.list_segments(attempt.attempt)
            lowest_after = self._get_lowest_after(segments)
            rows: list[Metrics] = []
            for number, blocks in enumerate(self.reports.read_blocks(segments)):
                for block in blocks:
                    for selected in attempt.select(block):
                        rows += _make_rows(attempt.attempt, selected)
                rows.sort(key=lambda row: (row["index"], row["rank"]))
                count = _count_below(rows, lowest_after[number])
                for row in rows[:count]:
                    yield _add_metrics(row, validated.pop(row["index"], {}))
                del rows[:count]

    def _get_lowest_after(self, segments: Sequence[Segment]) -> list[float]:
        """Return for each segment the lowest report number in the segments after it."""
        lowest = [math.inf]
        for segment in reversed(segments[1:]):
            ranges = self.reports.get_summary(segment).ranges.values()
            firsts = (first for rank_ranges in ranges for first, _ in rank_ranges)
            lowest.append(min(firsts, default=math.inf))
            lowest[-1] = min(lowest[-2:])
        return lowest[::-1]


def _make_no_run_error(directory: RunDirectory) -> FileNotFoundError:
    return FileNotFoundError(
        f"{directory.uri} is not a Drawbar run: it has no {directory.journal_path.name}. "
        f"Pass the directory of a run.{suggest_remote(directory.root)}"
    )


def _count_below(rows: Sequence[Metrics], index: float) -> int:
    return next((n for n, row in enumerate(rows) if row["index"] >= index), len(rows))


def _make_rows(attempt: int, block: ReportBlock) -> Iterator[Metrics]:
    for row, index in enumerate(block.indices):
        values: Metrics = {
            "rank": block.rank,
            "index": index,
            "attempt": attempt,
            "time": block.time[row],
        }
        yield _add_metrics(values, block.get_metrics(row))


def _add_metrics(row: Metrics, metrics: Metrics) -> Metrics:
    for name, value in flatten(metrics).items():
        row[get_column_name(name)] = value
    return row


def get_column_name(metric: str) -> str:
    """Return the column of a metric in a table of reports."""
    return f"metric/{metric}" if metric in REPORT_COLUMNS else metric
