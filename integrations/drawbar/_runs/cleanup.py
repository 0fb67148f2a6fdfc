"""Find and remove files of runs that are no longer needed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from drawbar._records.checkpoint_config import CheckpointConfig, parse_checkpoint_config
from drawbar._records.events import CheckpointDeleted, JournaledEvent, RunStarted
from drawbar._records.journal import Journal
from drawbar._records.ranking import find_best_of_framework, select_surplus
from drawbar._records.report_ranges import list_committed_names
from drawbar._runs.sockets import is_dead_socket
from drawbar._storage.contents import is_external, list_parents
from drawbar._storage.download_cache import get_user_temp_directory, remove_if_unused
from drawbar._storage.files import compute_tree_size, has_open_files, remove_tree
from drawbar._storage.journal_file import JOURNAL_FILE, JournalFile, is_locked
from drawbar._storage.manifest import Manifest, read_manifest
from drawbar._storage.remote_store import RemoteCheckpointStore
from drawbar._storage.run_directory import RunDirectory, list_work_directories
from drawbar._storage.run_files import RUN_FILE_NAMES
from drawbar._storage.storage_path import LocalPath, StoragePath

_WORK_DIRECTORY_NAME = re.compile(r".+-[0-9a-f]{12}")
_WORK_DIRECTORY_FILES = frozenset({*RUN_FILE_NAMES, ".staging", ".workers", ".bring.lock"})


@dataclass(frozen=True)
class UnusedFile:
    """A file, directory, or socket that no run needs.

    Attributes:
        kind: Description, such as "old checkpoint".
        path: Path or URI.
        nbytes: Size in bytes.

    Example:
        Print what could be removed from a run:

            for file in runs.find_run("experiment").find_unused_files():
                print(file.kind, file.path, file.nbytes)
    """

    kind: str
    path: str
    nbytes: int
    _remove: Callable[[], object]

    def remove(self) -> None:
        """Delete the files.

        Raises:
            RunInProgressError: The run was started in the meantime.
            OSError: The storage cannot be written.
        """
        self._remove()


def find_unused_files(
    directory: RunDirectory, events: Sequence[JournaledEvent], num_to_keep: int | None
) -> Iterator[UnusedFile]:
    """Find unused files of a run that is not in progress; see `RunRecord.find_unused_files`."""
    if not events or is_locked(directory.journal_path):
        return
    for path in (directory.staging.path, directory.local_path / ".workers"):
        if _is_nonempty_directory(path):
            yield UnusedFile(
                "uncommitted files",
                str(path),
                compute_tree_size(path),
                partial(_remove_uncommitted, directory, path),
            )
    if directory.remote_path is not None:
        # Remote storage has no staging area. Uncommitted files are in directories that are next to
        # the committed checkpoints.
        store = RemoteCheckpointStore(directory.remote_path)
        for name in store.list_uncommitted():
            directory_path = store.root / name
            size = sum(file.size for file in directory_path.list_files())
            yield UnusedFile(
                "uncommitted files", str(directory_path), size, directory_path.delete_tree
            )
    starts = [event for event in events if isinstance(event, RunStarted)]
    if num_to_keep is not None and starts:
        config = replace(parse_checkpoint_config(starts[-1].config), num_to_keep=num_to_keep)
        yield from _find_surplus_checkpoints(directory, list_committed_names(events), config)


def _is_nonempty_directory(path: Path) -> bool:
    """Return True for a non-empty directory that this user can read, and that is not a link."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode) and any(path.iterdir())
    except (FileNotFoundError, PermissionError):
        return False


def _find_surplus_checkpoints(
    directory: RunDirectory, names: set[str], config: CheckpointConfig
) -> Iterator[UnusedFile]:
    """Find checkpoints that the retention policy `config` does not keep.

    The checkpoints that the training framework calls its best are kept, too. Damaged checkpoints do
    not count and are kept: a resume uses the newest of the others.

    Args:
        directory: Directory of the run.
        names: Names of checkpoints that this run has committed. Other checkpoints in the directory,
            such as copies that the user made, are not included. External checkpoints are not
            included either.
        config: Retention policy.
    """
    store = directory.checkpoints
    committed = [
        manifest
        for manifest in store.list_readable()[0]
        if manifest.name in names and not store.find_damage(manifest)
    ]
    best = find_best_of_framework(committed)
    for manifest in select_surplus(committed, config):
        if manifest.name in best or is_external(manifest.name):
            continue
        if _has_symlink_in_path(directory, manifest.name):
            continue
        yield UnusedFile(
            "old checkpoint",
            str(store.path(manifest.name)),
            manifest.nbytes,
            partial(_delete_checkpoint, directory, manifest),
        )


def _has_symlink_in_path(directory: RunDirectory, name: str) -> bool:
    """Return whether a directory between the run directory and a checkpoint is a symbolic link."""
    return any((directory.local_path / parent).is_symlink() for parent in list_parents(name))


@contextmanager
def _lock_run(directory: RunDirectory) -> Iterator[Journal]:
    """Hold the journal of a run, so that no other process can resume the run in the meantime."""
    journal = Journal(directory.journal_path)
    try:
        directory.run_files.sync_journal(journal)
        yield journal
        directory.run_files.upload()
    finally:
        journal.close()
    directory.finish()


def _remove_uncommitted(directory: RunDirectory, path: Path) -> None:
    with _lock_run(directory):
        # A rank has moved these files here, so there is no other copy.
        directory.preserve_uncommitted()
        _remove_completely(path)


def _remove_completely(path: Path) -> None:
    """Delete a directory.

    Raises:
        PermissionError: Some files could not be deleted.
    """
    remove_tree(path)
    if os.path.lexists(path):
        raise PermissionError(errno.EACCES, "this user cannot delete some of its files", str(path))


def _delete_checkpoint(directory: RunDirectory, manifest: Manifest) -> None:
    name = manifest.name
    with _lock_run(directory) as journal:
        current = read_manifest(directory.checkpoints.path(name))
        if current is None or current.time != manifest.time:
            return  # deleted by another process, or replaced by a new run
        directory.staging.path.mkdir(parents=True, exist_ok=True)
        journal.append(CheckpointDeleted(time=time.time(), name=name))
        directory.checkpoints.delete(name)


def delete_run(directory: RunDirectory) -> None:
    """Delete the directory of a run that is not in progress; see `RunRecord.delete`."""
    root = directory.root
    if isinstance(root, LocalPath) and root.is_symlink():
        raise ValueError(f"{root} is a symbolic link. Delete the directory to which it refers.")
    if nested := _find_nested_run(root):
        raise ValueError(f"{root} also contains the run {nested!r}. Delete that run first.")
    journal = JournalFile(directory.journal_path)  # so that no other process resumes the run
    try:
        # The journal is deleted last. After an interruption, the run can be deleted again.
        if isinstance(root, LocalPath):
            for path in root.iterdir():
                if path.is_dir() and not path.is_symlink():
                    _remove_completely(path)
                elif path.name != JOURNAL_FILE:
                    path.unlink()
            directory.journal_path.unlink()
            with contextlib.suppress(OSError):  # another process starts a run of this name
                root.rmdir()
        else:
            for name in root.list_directories():
                (root / name).delete_tree()
            root.delete_tree()
            _remove_completely(directory.local_path)
    finally:
        journal.close()


def _find_nested_run(root: StoragePath) -> str | None:
    """Return the name of a run whose directory is in the directory of another run, or None."""
    if isinstance(root, LocalPath):
        walk = (path for path, _, files in os.walk(root) if JOURNAL_FILE in files)
        nested = [os.path.relpath(path, root) for path in walk if Path(path) != root]
    else:
        names = [file.path for file in root.list_files() if file.path.endswith(f"/{JOURNAL_FILE}")]
        nested = [name.removesuffix(f"/{JOURNAL_FILE}") for name in names]
    return f"{root.name}/{min(nested)}" if nested else None


def find_unused_local_files(min_age_s: float) -> Iterator[UnusedFile]:
    """Find files on this machine that no run and no reader of a checkpoint needs.

    These are:
      - copies of remote checkpoints that no process reads
      - copies that `Checkpoint.to_directory()` made
      - sockets of dead processes
      - work directories of runs that use remote storage and are not in progress

    Args:
        min_age_s: Minimum age in seconds of copies and work directories.

    Yields:
        Files that can be removed.

    Raises:
        CheckpointError: Another user owns the directory for copies, or can access it.

    Example:
        Delete unused files that are older than a week:

            for file in runs.find_unused_local_files(min_age_s=7 * 24 * 3600):
                file.remove()
    """
    cutoff_time = time.time() - min_age_s
    for path in sorted(get_user_temp_directory().iterdir()):
        if path.suffix == ".sock":
            if is_dead_socket(path):
                remove = partial(path.unlink, missing_ok=True)
                yield UnusedFile("socket of a dead process", str(path), 0, remove)
        elif path.is_dir() and path.suffix != ".partial" and _get_modified_time(path) < cutoff_time:
            remove = partial(remove_if_unused, path)
            yield UnusedFile("copy of a checkpoint", str(path), compute_tree_size(path), remove)
    for path in list_work_directories():
        if _is_unused_work_directory(path, cutoff_time):
            kind = "work directory of a remote run"
            remove = partial(_remove_work_directory, path, cutoff_time)
            yield UnusedFile(kind, str(path), compute_tree_size(path), remove)


def _is_unused_work_directory(path: Path, cutoff_time: float) -> bool:
    """Return True if a work directory is old, has no files of the user, and no process uses it.

    On the driver's node, the driver holds the lock of the journal. On other nodes, there is no
    journal, but each worker has its log open.

    Args:
        path: Work directory.
        cutoff_time: All files must be older than this time.
    """
    directory = RunDirectory(path)
    if not _WORK_DIRECTORY_NAME.fullmatch(path.name) or path.is_symlink():
        return False
    if directory.staging.list_moved() or not _WORK_DIRECTORY_FILES.issuperset(os.listdir(path)):
        return False
    entries = (f"{root}/{name}" for root, _, files in os.walk(path) for name in (*files, "."))
    if any(_get_modified_time(entry) >= cutoff_time for entry in entries):
        return False
    return not is_locked(directory.journal_path) and not has_open_files(path)


def _remove_work_directory(path: Path, cutoff_time: float) -> None:
    if path.exists() and _is_unused_work_directory(path, cutoff_time):
        _remove_completely(path)


def _get_modified_time(path: str | Path) -> float:
    """Return the time of the last change; infinity for a file that no longer exists."""
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_mtime
    return float("inf")
