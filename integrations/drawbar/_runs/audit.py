"""Check that a run directory keeps Drawbar's guarantees after a crash."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from drawbar._history.run_history import RunHistory
from drawbar._process.errors import CheckpointError
from drawbar._records.events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointDeleted,
    JournaledEvent,
    ReportsLost,
    WorkersStarted,
)
from drawbar._records.report_ranges import (
    AttemptReports,
    get_checkpoint_indices,
    list_attempt_reports,
)
from drawbar._storage.filesystem import AnyFileSystem
from drawbar._storage.run_directory import RunDirectory, open_run_directory


def check_run(
    path: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
) -> None:
    """Check that the directory of a run is intact, also during the run or after a kill.

    The checks are:

    - The journal and all reports can be read, and were not truncated.
    - Attempts are numbered upwards.
    - In each attempt, each rank's reports are numbered upwards from the attempt's first report,
      without gap or duplicate.
    - The history of all attempts has no gap or duplicate either, except for reports whose loss
      was recorded by a start. Ranks of an elastic group may leave and join.
    - Each checkpoint was committed after every rank had made its report.
    - Each committed checkpoint that retention has not deleted exists and passes `verify()`.

    Args:
        path: Directory or URI of the run.
        storage_filesystem: Filesystem of `path`, as for `RunConfig`.

    Raises:
        AssertionError: A check failed; the message describes it.
        FileNotFoundError: There is no journal at `path`.
        DamagedRunError: The journal or the reports cannot be read, or were truncated.

    Example:
        Check a run after its driver was killed:

            check_run(tmp_path / "run")
    """
    directory = open_run_directory(path, storage_filesystem)
    history = RunHistory.read(directory)
    events = history.events
    reports = _read_reports(history)
    attempts = {attempt.attempt: attempt for attempt in list_attempt_reports(events)}
    if any(number > max(attempts, default=-1) for number in reports):
        # An active run has started an attempt since the journal was read.
        for later in list_attempt_reports(RunHistory.read(directory).events):
            if later.attempt not in attempts:
                reports.pop(later.attempt, None)
    _check_events(events, attempts, reports)
    _check_numbers(attempts, reports)
    _check_history(history, attempts.values())
    for name in get_checkpoint_indices(events):  # in commit order
        _check_checkpoint(directory, name)


def _read_reports(history: RunHistory) -> dict[int, dict[int, list[int]]]:
    """Return the numbers of all stored reports by attempt and rank."""
    reports: dict[int, dict[int, list[int]]] = {}
    for attempt in history.reports.list_attempts():
        by_rank = reports.setdefault(attempt, {})
        segments = history.reports.list_segments(attempt)
        for blocks in history.reports.read_blocks(segments):
            for block in blocks:
                by_rank.setdefault(block.rank, []).extend(block.indices)
        for indices in by_rank.values():
            indices.sort()
    return reports


def _check_events(
    events: Sequence[JournaledEvent],
    attempts: dict[int, AttemptReports],
    reports: dict[int, dict[int, list[int]]],
) -> None:
    """Check the order of attempts and checkpoints, and that reports precede their checkpoint."""
    attempt, first, workers = -1, 0, 0
    existing: dict[str, int] = {}
    for event in events:
        committed = max(existing.values(), default=-1)
        match event:
            case AttemptStarted():
                assert event.attempt > attempt, f"attempt {event.attempt} follows {attempt}"
                attempt, first, workers = event.attempt, event.first_report_index, 0
                assert first > committed, (
                    f"attempt {attempt} begins at report {first}, but checkpoint {committed} exists"
                )
            case ReportsLost():
                workers = 0
            case WorkersStarted():
                workers = len(event.workers)
            case CheckpointCommitted():
                assert event.index > committed, f"checkpoint {event.index} follows {committed}"
                by_rank = reports.get(event.attempt, {})
                behind = [
                    rank
                    for rank in range(workers)
                    if by_rank.get(rank, [-1])[-1] < event.index
                    and not _is_lost(attempts.get(event.attempt), rank, event.index)
                ]
                assert not behind, f"checkpoint {event.index} came before the reports of {behind}"
                existing[event.name] = event.index
            case CheckpointDeleted():
                existing.pop(event.name, None)
            case _:
                pass


def _check_numbers(
    attempts: dict[int, AttemptReports], reports: dict[int, dict[int, list[int]]]
) -> None:
    """Check that the reports of each rank have no gap or duplicate in an attempt."""
    for number, by_rank in reports.items():
        # If the journal was lost, the reports of the attempts in it remain. Reports are uploaded
        # before the journal, so a kill between them has the same effect.
        attempt = attempts.get(number)
        assert attempt is not None or number < max(attempts, default=0), (
            f"attempt {number} has reports, but was not started"
        )
        for rank, indices in by_rank.items():
            stored = set(indices)
            first = indices[0] if attempt is None else attempt.first
            expected = [
                index
                for index in range(first, indices[-1] + 1)
                if index in stored or not _is_lost(attempt, rank, index)
            ]
            assert indices == expected, (
                f"the reports of rank {rank} in attempt {number} have a gap or a duplicate"
            )


def _is_lost(attempt: AttemptReports | None, rank: int, index: int) -> bool:
    lost = [] if attempt is None else attempt.get_lost(rank)
    return any(first <= index < end for first, end in lost)


def _check_history(history: RunHistory, attempts: Collection[AttemptReports]) -> None:
    indices_by_rank: dict[int, list[int]] = {}
    for _, block in history.iter_blocks():
        indices_by_rank.setdefault(block.rank, []).extend(block.indices)
    for rank, indices in indices_by_rank.items():
        indices.sort()
        # In an elastic group, a rank can join, leave, and join again.
        expected = [
            index
            for attempt in attempts
            if _has_rank(history, attempt, rank)
            for first, end in attempt.get_ranges(rank)
            for index in range(int(first), int(min(end, indices[-1] + 1)))
        ]
        assert indices == expected, (
            f"the history of rank {rank} has a gap or a duplicate: {indices}"
        )


def _has_rank(history: RunHistory, attempt: AttemptReports, rank: int) -> bool:
    if attempt.num_workers:
        return rank < attempt.num_workers
    # The journal was truncated, so that only the reports show which ranks there were.
    return rank in history.reports.get_last(attempt.attempt)


def _check_checkpoint(directory: RunDirectory, name: str) -> None:
    try:
        directory.checkpoints.get_checkpoint(name).verify()
    except CheckpointError as error:
        # It may have been deleted in the meantime.
        if name in get_checkpoint_indices(RunHistory.read(directory).events):
            raise AssertionError(f"a committed checkpoint is lost: {error}") from error
