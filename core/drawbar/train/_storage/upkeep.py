"""What is done to a run's directory as the run begins and ends: made, swept, tidied, left."""

from __future__ import annotations

import contextlib
from pathlib import Path

from drawbar.train._storage.files import remove_tree
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.run_files import OUTCOME_FILE


def create_directories(run: RunDirectory) -> None:
    """Make the folders that a run needs."""
    for folder in (run.staging.path, run.local_path / "logs", run.local_path / ".workers"):
        folder.mkdir(parents=True, exist_ok=True)


def clean_up(run: RunDirectory) -> None:
    """Remove what earlier processes of this run left uncommitted or half deleted.

    Raises:
        OSError: The storage cannot be written.
    """
    # Before the staging area goes: these files are nowhere else any more.
    preserve_uncommitted(run)
    remove_tree(run.staging.path)
    remove_tree(run.local_path / ".workers")
    run.run_files.delete(OUTCOME_FILE)
    create_directories(run)
    run.run_files.check_writable()
    run.checkpoints.clean_up()


def preserve_uncommitted(run: RunDirectory) -> None:
    """Keep what was handed over and did not become part of a checkpoint, and say where."""
    # Asked first: listing the checkpoints of a remote storage costs a request each.
    if run.staging.list_moved():
        run.staging.preserve_moved([each.name for each in run.checkpoints.list_committed()])


def finish(run: RunDirectory) -> None:
    """Delete the directories that a run needs only while it is in progress.

    Of a remote run, this is its whole work folder. Files that a user has handed over, and that are
    not part of a checkpoint, stay.
    """
    _remove_at_once(run, run.local_path / ".workers")
    if not run.staging.list_moved():
        remove_tree(run.staging.path)
    if run.remote_path is not None and not run.staging.preserved_path.exists():
        remove_tree(run.local_path)


def _remove_at_once(run: RunDirectory, folder: Path) -> None:
    # A process that has just been killed may still write its exit report. By a rename, the path is
    # gone before the files are, so that no late report brings it back.
    with contextlib.suppress(OSError):
        run.staging.path.mkdir(exist_ok=True)
        remove_tree(run.staging.move_to_trash(folder))


def finish_on_node(run: RunDirectory, rank: int) -> None:
    """Remove what a rank leaves on a node that is not the driver's, once its log is published.

    All of it stays if a user has handed over files that nobody else has; of a storage that is
    mounted, but not shared, the logs do.
    """
    if run.staging.list_moved():
        return
    for place in (run.staging.path, run.local_path / ".workers", run.local_path / ".bring.lock"):
        remove_tree(place)
    if run.remote_path is not None:
        remove_tree(run.get_log_path(rank))
        with contextlib.suppress(OSError):  # the log of another rank, or a file of the user's
            run.get_log_path(rank).parent.rmdir()
            run.local_path.rmdir()
