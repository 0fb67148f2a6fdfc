"""Check that a run directory keeps Drawbar's guarantees after a crash."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from drawbar.train._errors import CheckpointError
from drawbar.train._history.events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointDeleted,
    JournaledEvent,
    ReportReceived,
    ReportsLost,
    WorkersStarted,
)
from drawbar.train._history.journal import (
    get_checkpoint_indices,
    read_events,
    select_effective_reports,
)
from drawbar.train._storage.filesystem import AnyFileSystem
from drawbar.train._storage.run_directory import RunDirectory, open_run_directory


def check_run(
    path: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
) -> None:
    """Check that the directory of a run is intact, also during the run or after a kill.

    The checks are:

    - The journal can be read and was not truncated.
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
        DamagedRunError: The journal cannot be read, or was truncated.

    Example:
        Check a run after its driver was killed::

            check_run(tmp_path / "run")
    """
    directory = open_run_directory(path, storage_filesystem)
    events = read_events(directory)
    _check_reports(events)
    _check_history(events)
    for name in _list_checkpoint_names(events):
        _check_checkpoint(directory, name)


def _check_reports(events: Sequence[JournaledEvent]) -> None:
    attempt, first = -1, 0
    existing: dict[str, int] = {}
    next_reports: dict[int, int] = {}
    for event in events:
        committed = max(existing.values(), default=-1)
        match event:
            case AttemptStarted():
                assert event.attempt > attempt, f"attempt {event.attempt} follows {attempt}"
                attempt, first, next_reports = event.attempt, event.first_report_index, {}
                assert first > committed, (
                    f"attempt {attempt} begins at report {first}, but checkpoint {committed} exists"
                )
            case ReportsLost():
                next_reports = {}
            case WorkersStarted():
                next_reports = dict.fromkeys(range(len(event.workers)), first)
            case ReportReceived():
                expected = next_reports.get(event.rank)
                assert (event.attempt, event.index) == (attempt, expected), (
                    f"report {event.index} of rank {event.rank} in attempt {event.attempt} is out "
                    f"of order: report {expected} of attempt {attempt} was expected"
                )
                next_reports[event.rank] = event.index + 1
            case CheckpointCommitted():
                assert event.index > committed, f"checkpoint {event.index} follows {committed}"
                behind = [rank for rank, reports in next_reports.items() if reports <= event.index]
                assert not behind, f"checkpoint {event.index} came before the reports of {behind}"
                existing[event.name] = event.index
            case CheckpointDeleted():
                existing.pop(event.name, None)
            case _:
                pass


def _check_history(events: Sequence[JournaledEvent]) -> None:
    indices_by_rank: dict[int, list[int]] = defaultdict(list)
    for report in select_effective_reports(events):
        indices_by_rank[report.rank].append(report.index)
    attempts = _list_attempt_sizes(events)
    for rank, indices in indices_by_rank.items():
        expected = _list_expected_reports(attempts, rank, end=indices[-1] + 1)
        assert indices == expected, (
            f"the history of rank {rank} has a gap or a duplicate: {indices}"
        )


def _list_attempt_sizes(events: Sequence[JournaledEvent]) -> list[tuple[int, int]]:
    """Return the first report and the number of workers of each attempt in the history.

    An attempt whose reports were lost ends before the first of them; an entry with 0 workers
    follows.
    """
    attempts: list[tuple[int, int]] = []
    for event in events:
        if isinstance(event, AttemptStarted):
            attempts = [entry for entry in attempts if entry[0] < event.first_report_index]
            attempts.append((event.first_report_index, 0))
        elif isinstance(event, ReportsLost):
            attempts = [entry for entry in attempts if entry[0] < event.first]
            attempts.append((event.first, 0))
        elif isinstance(event, WorkersStarted):
            attempts[-1] = (attempts[-1][0], len(event.workers))
    return attempts


def _list_expected_reports(
    attempts: Sequence[tuple[int, int]], rank: int, *, end: int
) -> list[int]:
    """Return the reports before `end` that a rank must have made in its attempts.

    In an elastic group, a rank can join, leave, and join again.
    """
    expected: list[int] = []
    for (first, workers), (following, _) in pairwise([*attempts, (end, 0)]):
        if rank < workers:
            expected += range(first, min(following, end))
    return expected


def _list_checkpoint_names(events: Sequence[JournaledEvent]) -> list[str]:
    return list(get_checkpoint_indices(events))  # in commit order


def _check_checkpoint(directory: RunDirectory, name: str) -> None:
    try:
        directory.checkpoints.get_checkpoint(name).verify()
    except CheckpointError as error:
        if name in _list_checkpoint_names(read_events(directory)):  # not deleted in the meantime
            raise AssertionError(f"a committed checkpoint is lost: {error}") from error
