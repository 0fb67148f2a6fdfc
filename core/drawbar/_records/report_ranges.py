"""Determine from the journal which reports are part of the history, and which are missing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from drawbar._base.metrics import Metrics
from drawbar._records.events import (
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
from drawbar._records.report_blocks import ReportBlock
from drawbar._records.rollback import Rollback
from drawbar._records.stored_reports import StoredReports
from drawbar._records.timeline import RunState
from drawbar._storage.manifest import Manifest

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
        lost: Reports whose loss was recorded.
    """

    attempt: int
    first: int
    end: float = math.inf
    num_workers: int = 0
    num_reports: int | None = None
    checkpoint: str = ""
    checkpoint_end: int = 0
    lost: list[ReportsLost] = field(default_factory=list)

    def add_checkpoint(self, name: str, index: int) -> None:
        """Record a committed checkpoint."""
        if index >= self.checkpoint_end:
            self.checkpoint, self.checkpoint_end = name, index + 1

    @property
    def ranges(self) -> list[Range]:
        """Reports that are part of the history on at least one rank: neither replaced nor lost."""
        lost_on_all = [(lost.first, lost.until) for lost in self.lost if not lost.ranks]
        return _subtract([(self.first, self.end)], lost_on_all)

    def get_ranges(self, rank: int) -> list[Range]:
        """Return the reports of a rank that are part of the history."""
        return _subtract([(self.first, self.end)], self.get_lost(rank))

    def get_lost(self, rank: int) -> list[Range]:
        """Return the reports of a rank whose loss was recorded."""
        return [(e.first, e.until) for e in self.lost if not e.ranks or rank in e.ranks]

    def select(self, block: ReportBlock) -> Iterator[ReportBlock]:
        """Yield the reports of a block that are part of the history."""
        for first, end in self.get_ranges(block.rank):
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
        apply_to_attempts(attempts, event)
    return attempts


def apply_to_attempts(attempts: list[AttemptReports], event: JournaledEvent) -> None:
    """Update the reports of each attempt with the next event."""
    match event:
        case AttemptStarted():
            # The ends of the attempts are in ascending order, so this stops early.
            for earlier in reversed(attempts):
                if earlier.end <= event.first_report_index:
                    break
                earlier.end = event.first_report_index
            attempts.append(AttemptReports(event.attempt, event.first_report_index))
        case ReportsLost():
            for earlier in attempts:
                earlier.lost.append(event)
        case WorkersStarted() if attempts:
            attempts[-1].num_workers = len(event.workers)
        case CheckpointCommitted():
            for attempt in reversed(attempts):  # it is one of the last ones
                if attempt.attempt == event.attempt:
                    attempt.add_checkpoint(event.name, event.index)
                    break
        case AttemptEnded() | RunEnded() if attempts and event.num_reports is not None:
            attempts[-1].num_reports = event.num_reports
        case _:
            pass


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
        elif isinstance(event, AttemptEnded) and event.rollback is not None:
            for name in event.rollback.discarded:
                indices.pop(name, None)
    return indices


def make_run_state(events: Sequence[JournaledEvent], reports: StoredReports) -> RunState:
    """Return the state of a run after its last event and report."""
    state = RunState.from_events(events)
    state.last_metrics = _get_last_metrics(list_attempt_reports(events), reports)
    return state


def _get_last_metrics(
    attempts: Sequence[AttemptReports], reports: StoredReports
) -> dict[int, Metrics]:
    """Return the last metrics of each rank that all later attempts have, replaced or not."""
    last: dict[int, Metrics] = {}
    limit = 0
    for attempt in reversed(attempts):
        if attempt.num_workers:
            limit = min(limit or attempt.num_workers, attempt.num_workers)
        if limit and len(last) >= limit:
            break
        for rank, block in reports.get_last(attempt.attempt).items():
            if rank < (limit or rank + 1):
                last.setdefault(rank, block.get_metrics(-1))
    return dict(sorted(last.items()))


def list_rollbacks(events: Iterable[JournaledEvent]) -> list[Rollback]:
    """Return the rollbacks of a run, oldest first."""
    ends = [event.rollback for event in events if isinstance(event, AttemptEnded)]
    return [rollback for rollback in ends if rollback is not None]


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
    missing: dict[tuple[int, ...], list[Range]] = {}  # by ranks; () means all
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
            missing.setdefault((), []).append((latest_index + 1, manifest.index + 1))
            checkpoint = manifest.name
    for attempt in attempts:
        for lost_range, ranks in _find_missing_in_attempt(attempt, reports).items():
            is_all = len(ranks) == attempt.num_workers
            missing.setdefault(() if is_all else tuple(ranks), []).append(lost_range)
            checkpoint = checkpoint or attempt.checkpoint
    now = time.time()
    lost = [
        ReportsLost(
            time=now, first=int(first), until=int(end), ranks=list(ranks), checkpoint=checkpoint
        )
        for ranks, ranges in missing.items()
        for first, end in _merge(ranges)
    ]
    return sorted(lost, key=lambda event: (event.first, event.until))


def describe_missing(missing: Sequence[ReportsLost]) -> str:
    """Return a description such as `reports 3 to 5, 9 to 9`."""
    merged = _merge((lost.first, lost.until) for lost in missing)
    ranges = [f"{int(first)} to {int(end) - 1}" for first, end in merged[:MAX_DESCRIBED_RANGES]]
    num_more = len(merged) - len(ranges)
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


def _find_missing_in_attempt(
    attempt: AttemptReports, reports: StoredReports
) -> dict[Range, list[int]]:
    """Return the missing ranges, and the ranks whose reports are missing in each of them."""
    ranks = range(attempt.num_workers)
    if not attempt.ranges or not ranks or _is_complete(attempt, reports):
        return {}
    stored: dict[int, list[Range]] = {rank: [] for rank in ranks}
    for segment in reports.list_segments(attempt.attempt):
        for rank, ranges in reports.get_summary(segment).ranges.items():
            stored.setdefault(rank, []).extend(ranges)
    next_reports = {
        rank: max((end for _, end in ranges), default=attempt.first)
        for rank, ranges in stored.items()
    }
    missing = {
        rank: _subtract(
            [(attempt.first, max(next_reports[rank], attempt.checkpoint_end))], stored_ranges
        )
        for rank, stored_ranges in stored.items()
    }
    num_stored = sum(int(end - first) for ranges in stored.values() for first, end in ranges)
    is_any_missing = any(missing.values())
    if not is_any_missing and attempt.num_reports is not None and num_stored < attempt.num_reports:
        # The last reports are missing. Which ranks made them is unknown.
        count = math.ceil((attempt.num_reports - num_stored) / len(ranks))
        end = min(next_reports.values()) + count
        missing = {rank: [(first, end)] for rank, first in next_reports.items() if first < end}
    ranks_by_range: dict[Range, list[int]] = {}
    for rank, candidates in missing.items():
        # Reports from `end` on were replaced.
        for missing_range in _subtract(
            candidates, [(attempt.end, math.inf), *attempt.get_lost(rank)]
        ):
            ranks_by_range.setdefault(missing_range, []).append(rank)
    return ranks_by_range


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
