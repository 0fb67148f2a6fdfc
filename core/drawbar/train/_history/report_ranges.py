"""Determine from the journal which reports are part of the history, and which are missing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from drawbar.train._history.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointValidated,
    JournaledEvent,
    ReportsLost,
    RunEnded,
    RunStarted,
    WorkersStarted,
)
from drawbar.train._history.report_blocks import ReportBlock
from drawbar.train._history.stored_reports import StoredReports
from drawbar.train._metrics import Metrics
from drawbar.train._storage.manifest import Manifest

Range = tuple[float, float]
"""Report numbers from the first one to before the second one."""

MAX_DESCRIBED_RANGES = 5


@dataclass
class AttemptReports:
    """Reports of an attempt, as the journal describes them.

    Attributes:
        attempt: Number of the attempt.
        first: Number of the first report.
        end: Later attempts have replaced this report and all reports after it.
        num_workers: Number of ranks; 0 if they did not start.
        num_reports: Number of reports of all ranks; None until the attempt has ended.
        checkpoint: Name of the newest committed checkpoint.
        checkpoint_end: One after its report number; 0 if there is no checkpoint.
        lost: Ranges of reports whose loss was recorded.
    """

    attempt: int
    first: int
    end: float = math.inf
    num_workers: int = 0
    num_reports: int | None = None
    checkpoint: str = ""
    checkpoint_end: int = 0
    lost: list[Range] = field(default_factory=list)

    def add_checkpoint(self, name: str, index: int) -> None:
        """Record a committed checkpoint."""
        if index >= self.checkpoint_end:
            self.checkpoint, self.checkpoint_end = name, index + 1

    @property
    def ranges(self) -> list[Range]:
        """Reports that are part of the history: neither replaced nor lost."""
        return _subtract([(self.first, self.end)], self.lost)

    def select(self, block: ReportBlock) -> Iterator[ReportBlock]:
        """Yield the reports of a block that are part of the history."""
        for first, end in self.ranges:
            if (selected := block.select_indices(int(first), end)) is not None:
                yield selected


def _subtract(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    remaining = list(ranges)
    for first, end in others:
        remaining = [
            part
            for low, high in remaining
            for part in ((low, min(high, first)), (max(low, end), high))
            if part[0] < part[1]
        ]
    return [(low, high) for low, high in remaining if low < high]


def list_attempt_reports(events: Iterable[JournaledEvent]) -> list[AttemptReports]:
    """Return the reports of each attempt, in order.

    An attempt that starts at report k replaces report k and all later reports of earlier attempts.
    Report numbers are contiguous, except where a `ReportsLost` event records a gap.
    """
    attempts: list[AttemptReports] = []
    for event in events:
        match event:
            case AttemptStarted():
                for earlier in attempts:
                    earlier.end = min(earlier.end, event.first_report_index)
                attempts.append(AttemptReports(event.attempt, event.first_report_index))
            case ReportsLost():
                for earlier in attempts:
                    earlier.lost.append((event.first, event.until))
            case WorkersStarted() if attempts:
                attempts[-1].num_workers = len(event.workers)
            case CheckpointCommitted():
                for attempt in attempts:
                    if attempt.attempt == event.attempt:
                        attempt.add_checkpoint(event.name, event.index)
            case AttemptEnded() | RunEnded() if attempts and event.num_reports is not None:
                attempts[-1].num_reports = event.num_reports
            case _:
                pass
    return attempts


def get_validation_metrics(events: Iterable[JournaledEvent]) -> dict[int, Metrics]:
    """Return the validation metrics of checkpoints by report number, without replaced reports."""
    validated: dict[int, Metrics] = {}
    for event in events:
        if isinstance(event, CheckpointValidated):
            validated[event.index] = event.metrics
        elif isinstance(event, AttemptStarted):
            first = event.first_report_index
            validated = {index: metrics for index, metrics in validated.items() if index < first}
    return validated


def get_checkpoint_indices(events: Iterable[JournaledEvent]) -> dict[str, int]:
    """Return the name and report number of each committed checkpoint that was not deleted."""
    indices: dict[str, int] = {}
    for event in events:
        if isinstance(event, CheckpointCommitted):
            indices[event.name] = event.index
        elif isinstance(event, CheckpointDeleted):
            indices.pop(event.name, None)
    return indices


def list_committed_names(events: Iterable[JournaledEvent]) -> set[str]:
    """Return the names of the checkpoints that were committed and not deleted."""
    return set(get_checkpoint_indices(events))


def find_missing_reports(
    events: Sequence[JournaledEvent], reports: StoredReports, manifests: Iterable[Manifest]
) -> list[ReportsLost]:
    """Find reports of the history that are missing in the segments.

    Reports are missing if later reports, the end of the attempt, or a checkpoint that was committed
    after them are recorded. Reports are written before a checkpoint is committed, and the commit is
    written to the journal after that. If the driver is killed between two of these steps, no report
    is missing.

    Of an attempt without an open segment, only the last summary is read unless reports are missing.

    Args:
        events: Events of the journal.
        reports: Stored reports.
        manifests: Committed checkpoints.

    Returns:
        The ranges of missing reports, in order.
    """
    attempts = list_attempt_reports(events)
    by_number = {attempt.attempt: attempt for attempt in attempts}
    run_ids = {event.run_id for event in events if isinstance(event, RunStarted)}
    latest_index = max(get_checkpoint_indices(events).values(), default=-1)
    missing: list[Range] = []
    checkpoint = ""
    for manifest in manifests:
        # A user may have copied checkpoints of other runs into the directory.
        if run_ids and manifest.run_id not in {"", *run_ids}:
            continue
        if manifest.attempt in by_number:
            by_number[manifest.attempt].add_checkpoint(manifest.name, manifest.index)
        elif manifest.index > latest_index:
            # The attempt that saved this checkpoint is not in the journal. It may have resumed from
            # the latest checkpoint in the journal and replaced all reports after that checkpoint.
            missing.append((latest_index + 1, manifest.index + 1))
            checkpoint = manifest.name
    for attempt in attempts:
        if ranges := _find_missing_in_attempt(attempt, reports):
            missing += ranges
            checkpoint = checkpoint or attempt.checkpoint
    return [
        ReportsLost(time=time.time(), first=int(first), until=int(end), checkpoint=checkpoint)
        for first, end in _merge(missing)
    ]


def describe_missing(missing: Sequence[ReportsLost]) -> str:
    """Return a description such as `reports 3 to 5, 9 to 9`."""
    ranges = [f"{lost.first} to {lost.until - 1}" for lost in missing[:MAX_DESCRIBED_RANGES]]
    num_more = len(missing) - len(ranges)
    return f"reports {', '.join(ranges)}" + (f", and {num_more} more ranges" if num_more else "")


def _merge(ranges: Iterable[Range]) -> list[Range]:
    """Return the union of ranges as disjoint ranges, in order."""
    merged: list[Range] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((first, end))
    return merged


def _find_missing_in_attempt(attempt: AttemptReports, reports: StoredReports) -> list[Range]:
    ranks = range(attempt.num_workers)
    if not attempt.ranges or not ranks or _is_complete(attempt, reports):
        return []
    missing: list[Range] = []
    next_reports = dict.fromkeys(ranks, attempt.first)
    stored: dict[int, list[Range]] = {rank: [] for rank in ranks}
    for segment in reports.list_segments(attempt.attempt):
        for rank, ranges in reports.get_summary(segment).ranges.items():
            stored.setdefault(rank, []).extend(ranges)
    for rank, stored_ranges in stored.items():
        next_reports[rank] = int(max((end for _, end in stored_ranges), default=attempt.first))
        expected = (attempt.first, max(next_reports[rank], attempt.checkpoint_end))
        missing += _subtract([expected], stored_ranges)
    num_stored = sum(int(end - first) for ranges in stored.values() for first, end in ranges)
    if not missing and attempt.num_reports is not None and num_stored < attempt.num_reports:
        # The last reports are missing. Which ranks made them is unknown.
        first = min(next_reports.values())
        missing = [(first, first + math.ceil((attempt.num_reports - num_stored) / len(ranks)))]
    return [
        (max(first, low), min(end, high))
        for first, end in missing
        for low, high in attempt.ranges
        if max(first, low) < min(end, high)
    ]


def _is_complete(attempt: AttemptReports, reports: StoredReports) -> bool:
    """Return True if the names and the last summary show that no report is missing."""
    segments = reports.list_segments(attempt.attempt)
    last = reports.get_last(attempt.attempt)
    # An open segment can lack lines, and a damaged one all of them.
    if segments and (segments[-1].end is None or segments[-1].path in reports.damage):
        return False
    if not reports.is_contiguous(attempt.attempt):
        return False
    if attempt.num_reports is not None:
        return reports.count_reports(attempt.attempt) == attempt.num_reports
    return attempt.checkpoint_end <= attempt.first or all(
        rank in last and last[rank].indices[0] >= attempt.checkpoint_end - 1
        for rank in range(attempt.num_workers)
    )
