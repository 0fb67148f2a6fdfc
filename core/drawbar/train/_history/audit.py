"""Whether a run directory keeps what Drawbar promises, whatever was killed while it was written."""

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
from drawbar.train._history.journal import kept_indices, read_events, select_effective_reports
from drawbar.train._storage.filesystem import AnyFileSystem
from drawbar.train._storage.run_directory import RunDirectory, open_run_directory


def check_run(
    path: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
) -> None:
    """Check that the directory of a run is intact, also while the run is active or after a kill.

    The checks are:

    - The journal can be read and was not truncated.
    - Attempts are numbered upwards.
    - In each attempt, each rank's reports are numbered upwards from the attempt's first report,
      without gap or duplicate.
    - The history of all attempts has no gap or duplicate either, except for reports whose loss
      a start has recorded. Ranks of an elastic group may leave and join.
    - Each checkpoint was committed after every rank had made its report.
    - Each committed checkpoint that retention has not deleted exists and passes `verify()`.

    Args:
        path: The run's directory, or its URI.
        storage_filesystem: The filesystem that `path` lies on, as for `RunConfig`.

    Raises:
        AssertionError: Something of that is not so; the message says what.
        FileNotFoundError: There is no journal at `path`.
        DamagedRunError: It cannot be read, or was truncated.
    """
    directory = open_run_directory(path, storage_filesystem)
    events = read_events(directory)
    _check_reports(events)
    _check_history(events)
    for name in _list_kept(events):
        _check_checkpoint(directory, name)


def _check_reports(events: Sequence[JournaledEvent]) -> None:
    attempt, first = -1, 0
    kept: dict[str, int] = {}
    made: dict[int, int] = {}
    for event in events:
        committed = max(kept.values(), default=-1)
        match event:
            case AttemptStarted():
                assert event.attempt > attempt, f"attempt {event.attempt} follows {attempt}"
                attempt, first, made = event.attempt, event.first_report_index, {}
                assert first > committed, (
                    f"attempt {attempt} begins at report {first}, checkpoint {committed} is there"
                )
            case ReportsLost():
                made = {}
            case WorkersStarted():
                made = dict.fromkeys(range(len(event.workers)), first)
            case ReportReceived():
                expected = made.get(event.rank)
                assert (event.attempt, event.index) == (attempt, expected), (
                    f"report {event.index} of rank {event.rank} in attempt {event.attempt} stands "
                    f"where report {expected} of attempt {attempt} belongs"
                )
                made[event.rank] = event.index + 1
            case CheckpointCommitted():
                assert event.index > committed, f"checkpoint {event.index} follows {committed}"
                behind = [rank for rank, reports in made.items() if reports <= event.index]
                assert not behind, f"checkpoint {event.index} came before the reports of {behind}"
                kept[event.name] = event.index
            case CheckpointDeleted():
                kept.pop(event.name, None)
            case _:
                pass


def _check_history(events: Sequence[JournaledEvent]) -> None:
    of_rank: dict[int, list[int]] = defaultdict(list)
    for report in select_effective_reports(events):
        of_rank[report.rank].append(report.index)
    worlds = _list_attempt_sizes(events)
    for rank, indices in of_rank.items():
        whole = _list_expected_reports(worlds, rank, end=indices[-1] + 1)
        assert indices == whole, f"the history of rank {rank} has a gap or a duplicate: {indices}"


def _list_attempt_sizes(events: Sequence[JournaledEvent]) -> list[tuple[int, int]]:
    """List the attempts that make up the history: the first report of each, and its workers.

    An attempt whose reports were lost ends at the first of them; an entry of no workers follows.
    """
    worlds: list[tuple[int, int]] = []
    for event in events:
        if isinstance(event, AttemptStarted):
            worlds = [each for each in worlds if each[0] < event.first_report_index]
            worlds.append((event.first_report_index, 0))
        elif isinstance(event, ReportsLost):
            worlds = [each for each in worlds if each[0] < event.first]
            worlds.append((event.first, 0))
        elif isinstance(event, WorkersStarted):
            worlds[-1] = (worlds[-1][0], len(event.workers))
    return worlds


def _list_expected_reports(worlds: Sequence[tuple[int, int]], rank: int, *, end: int) -> list[int]:
    """List the reports that a rank owes, before `end`: those of the attempts that it was part of.

    In an elastic group a rank may come later, go, and come again.
    """
    due: list[int] = []
    for (first, workers), (following, _) in pairwise([*worlds, (end, 0)]):
        if rank < workers:
            due += range(first, min(following, end))
    return due


def _list_kept(events: Sequence[JournaledEvent]) -> list[str]:
    return list(kept_indices(events))  # in the order of the commits


def _check_checkpoint(directory: RunDirectory, name: str) -> None:
    try:
        directory.checkpoints.get_checkpoint(name).verify()
    except CheckpointError as error:
        if name in _list_kept(read_events(directory)):  # not deleted in the meantime
            raise AssertionError(f"a committed checkpoint is lost: {error}") from error
