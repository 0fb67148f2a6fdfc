"""Create, clean up, and finish a run directory."""

from __future__ import annotations

import contextlib
from pathlib import Path

from drawbar.train._storage.files import remove_tree
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.run_files import OUTCOME_FILE


def create_directories(run_directory: RunDirectory) -> None:
    """Create the subdirectories that a run needs."""
    for directory in (
        run_directory.staging.path,
        run_directory.local_path / "logs",
        run_directory.local_path / ".workers",
    ):
        directory.mkdir(parents=True, exist_ok=True)


def clean_up(run_directory: RunDirectory) -> None:
    """Remove uncommitted and partly deleted files of earlier processes of this run.

    Raises:
        OSError: The storage cannot be written.
    """
    # Before the staging area is deleted: moved files exist nowhere else.
    preserve_uncommitted(run_directory)
    remove_tree(run_directory.staging.path)
    remove_tree(run_directory.local_path / ".workers")
    run_directory.run_files.delete(OUTCOME_FILE)
    create_directories(run_directory)
    run_directory.run_files.check_writable()
    run_directory.checkpoints.clean_up()


def preserve_uncommitted(run_directory: RunDirectory) -> None:
    """Preserve moved files that did not become part of a checkpoint, and log where they are."""
    # Check this first: listing the checkpoints of remote storage costs a request for each.
    if run_directory.staging.list_moved():
        run_directory.staging.preserve_moved(
            [manifest.name for manifest in run_directory.checkpoints.list_committed()]
        )


def finish(run_directory: RunDirectory) -> None:
    """Delete the directories that a run needs only while it is in progress.

    For a remote run, this is the whole work directory. Moved files that are not part of a
    checkpoint are not deleted.
    """
    _remove_at_once(run_directory, run_directory.local_path / ".workers")
    if not run_directory.staging.list_moved():
        remove_tree(run_directory.staging.path)
    if run_directory.remote_path is not None and not run_directory.staging.preserved_path.exists():
        remove_tree(run_directory.local_path)


def _remove_at_once(run_directory: RunDirectory, directory: Path) -> None:
    # A process that was just killed may still write its exit report. A rename removes the path
    # before the files are deleted, so a late report cannot recreate it.
    with contextlib.suppress(OSError):
        run_directory.staging.path.mkdir(exist_ok=True)
        remove_tree(run_directory.staging.move_to_trash(directory))


def finish_on_node(run_directory: RunDirectory, rank: int) -> None:
    """Delete the files of a rank on a node other than the driver's, after its log was uploaded.

    Nothing is deleted while there are moved files that exist nowhere else. Logs are not deleted if
    the storage is local to the node.
    """
    if run_directory.staging.list_moved():
        return
    for path in (
        run_directory.staging.path,
        run_directory.local_path / ".workers",
        run_directory.local_path / ".bring.lock",
    ):
        remove_tree(path)
    if run_directory.remote_path is not None:
        remove_tree(run_directory.get_log_path(rank))
        with contextlib.suppress(OSError):  # contains another rank's log, or files of the user
            run_directory.get_log_path(rank).parent.rmdir()
            run_directory.local_path.rmdir()
