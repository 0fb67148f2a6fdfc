"""What is done to a run's directory as the run begins and ends: made, swept, tidied, left."""

from __future__ import annotations

import contextlib
from pathlib import Path

from drawbar.train._storage.files import remove_tree
from drawbar.train._storage.own_files import OUTCOME
from drawbar.train._storage.run_directory import RunDirectory


def create(run: RunDirectory) -> None:
    """Make the folders that a run needs."""
    for folder in (run.staging.path, run.path / "logs", run.path / ".workers"):
        folder.mkdir(parents=True, exist_ok=True)


def sweep(run: RunDirectory) -> None:
    """Remove what earlier processes of this run left uncommitted or half deleted.

    Raises:
        OSError: The storage cannot be written.
    """
    # Before the staging area goes: these files are nowhere else any more.
    set_aside(run)
    remove_tree(run.staging.path)
    remove_tree(run.path / ".workers")
    run.files.delete(OUTCOME)
    create(run)
    run.files.probe()
    run.checkpoints.sweep()


def set_aside(run: RunDirectory) -> None:
    """Keep what was handed over and did not become part of a checkpoint, and say where."""
    # Asked first: listing the checkpoints of a remote storage costs a request each.
    if run.staging.handed_over():
        run.staging.set_aside([each.name for each in run.checkpoints.committed()])


def leave(run: RunDirectory) -> None:
    """Delete the directories that a run needs only while it is in progress.

    Of a remote run, this is its whole work folder. Files that a user has handed over, and that are
    not part of a checkpoint, stay.
    """
    _remove_at_once(run, run.path / ".workers")
    if not run.staging.handed_over():
        remove_tree(run.staging.path)
    if run.folder is not None and not run.staging.uncommitted.exists():
        remove_tree(run.path)


def _remove_at_once(run: RunDirectory, folder: Path) -> None:
    # A process that has just been killed may still write its exit report. By a rename, the path is
    # gone before the files are, so that no late report brings it back.
    with contextlib.suppress(OSError):
        run.staging.path.mkdir(exist_ok=True)
        remove_tree(run.staging.bury(folder))


def leave_node(run: RunDirectory, rank: int) -> None:
    """Remove what a rank leaves on a node that is not the driver's, once its log is published.

    All of it stays if a user has handed over files that nobody else has; of a storage that is
    mounted, but not shared, the logs do.
    """
    if run.staging.handed_over():
        return
    for place in (run.staging.path, run.path / ".workers", run.path / ".bring.lock"):
        remove_tree(place)
    if run.folder is not None:
        remove_tree(run.log(rank))
        with contextlib.suppress(OSError):  # the log of another rank, or a file of the user's
            run.log(rank).parent.rmdir()
            run.path.rmdir()
