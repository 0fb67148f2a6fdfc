"""What runs leave behind and nobody needs any more: found first, removed only when told."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from drawbar.train._config.run_config import CheckpointConfig
from drawbar.train._history.events import CheckpointDeleted, JournaledEvent, RunStarted
from drawbar.train._history.journal import Journal, list_committed_names
from drawbar.train._history.ranking import parse_checkpoint_config, select_surplus
from drawbar.train._storage import upkeep
from drawbar.train._storage.contents import is_external, list_parents
from drawbar.train._storage.download_cache import get_user_temp_directory, remove_if_unused
from drawbar.train._storage.files import compute_tree_size, has_open_files, remove_tree
from drawbar.train._storage.journal_file import is_locked
from drawbar.train._storage.manifest import Manifest, read_manifest
from drawbar.train._storage.remote_store import RemoteCheckpointStore
from drawbar.train._storage.run_directory import RunDirectory, list_work_directories
from drawbar.train._storage.run_files import RUN_FILE_NAMES

_WORK_DIRECTORY_NAME = re.compile(r".+-[0-9a-f]{12}")
_WORK_DIRECTORY_FILES = frozenset({*RUN_FILE_NAMES, ".staging", ".workers", ".bring.lock"})


@dataclass(frozen=True)
class UnusedFile:
    """Something that may go.

    Attributes:
        what: Which kind of thing it is.
        path: Where it lies.
        nbytes: Bytes that are free when it is gone.
    """

    kind: str
    path: str
    nbytes: int
    _remove: Callable[[], object]

    def remove(self) -> None:
        """Remove it.

        Raises:
            RunInProgressError: Its run has begun to go on.
            OSError: The storage refuses.
        """
        self._remove()


def find_unused_files(
    directory: RunDirectory, events: tuple[JournaledEvent, ...], num_to_keep: int | None
) -> Iterator[UnusedFile]:
    """Give what may go of a run that does not go on; see `RunRecord.leftovers`."""
    if not events or is_locked(directory.journal_path):
        return
    for place in (directory.staging.path, directory.local_path / ".workers"):
        if _is_nonempty_directory(place):
            what = "what was never committed"
            yield UnusedFile(
                what,
                str(place),
                compute_tree_size(place),
                partial(_remove_uncommitted, directory, place),
            )
    if directory.remote_path is not None:
        # There is no staging area: what was never committed lies beside the checkpoints.
        store = RemoteCheckpointStore(directory.remote_path)
        for name in store.list_uncommitted():
            folder = store.root / name
            size = sum(file.size for file in folder.list_files())
            yield UnusedFile("what was never committed", str(folder), size, folder.delete_tree)
    starts = [event for event in events if isinstance(event, RunStarted)]
    if num_to_keep is not None and starts:
        config = replace(parse_checkpoint_config(starts[-1]), num_to_keep=num_to_keep)
        yield from _find_surplus_checkpoints(directory, list_committed_names(events), config)


def _is_nonempty_directory(folder: Path) -> bool:
    """Whether this is a folder, and no link to one, with something in it that this user sees."""
    try:
        return stat.S_ISDIR(os.lstat(folder).st_mode) and any(folder.iterdir())
    except (FileNotFoundError, PermissionError):
        return False


def _find_surplus_checkpoints(
    directory: RunDirectory, names: set[str], config: CheckpointConfig
) -> Iterator[UnusedFile]:
    """Give old ones of the checkpoints that the run has committed under these names.

    A copy that the user has made of one is the user's, and so is what lies elsewhere.
    """
    store = directory.checkpoints
    own = [each for each in store.list_readable()[0] if each.name in names]
    for manifest in select_surplus(own, config):
        if is_external(manifest.name) or _is_behind_symlink(directory, manifest.name):
            continue
        yield UnusedFile(
            "an old checkpoint",
            str(store.path(manifest.name)),
            manifest.nbytes,
            partial(_delete_checkpoint, directory, manifest),
        )


def _is_behind_symlink(directory: RunDirectory, name: str) -> bool:
    return any((directory.local_path / way).is_symlink() for way in list_parents(name))


@contextmanager
def _lock_run(directory: RunDirectory) -> Iterator[Journal]:
    """Hold a run's journal, so that nobody else goes on with the run meanwhile."""
    journal = Journal(directory.journal_path)
    try:
        directory.run_files.sync_journal(journal)
        yield journal
        directory.run_files.upload_journal()
    finally:
        journal.close()
    upkeep.finish(directory)


def _remove_uncommitted(directory: RunDirectory, place: Path) -> None:
    with _lock_run(directory):
        upkeep.preserve_uncommitted(directory)  # what was handed over is nowhere else
        _remove_completely(place)


def _remove_completely(place: Path) -> None:
    """Delete a folder.

    Raises:
        PermissionError: Some of it stays.
    """
    remove_tree(place)
    if os.path.lexists(place):
        raise PermissionError(errno.EACCES, "this user cannot delete all of it", str(place))


def _delete_checkpoint(directory: RunDirectory, manifest: Manifest) -> None:
    name = manifest.name
    with _lock_run(directory) as journal:
        there = read_manifest(directory.checkpoints.path(name))
        if there is None or there.time != manifest.time:
            return  # somebody else was faster, or a new run has one of this name
        directory.staging.path.mkdir(parents=True, exist_ok=True)
        journal.append(CheckpointDeleted(time=time.time(), name=name))
        directory.checkpoints.delete(name)


def find_unused_local_files(min_age_s: float) -> Iterator[UnusedFile]:
    """Give what runs and readers of checkpoints have left on this machine.

    That is: copies of remote checkpoints that nobody reads, copies that `to_directory()` has made,
    sockets of processes that are gone, and work folders of runs on remote storage that do not go
    on. Of copies and work folders that somebody may still use or want, only old ones.

    Args:
        older_than: In seconds.
    """
    limit = time.time() - min_age_s
    for path in sorted(get_user_temp_directory().iterdir()):
        if path.suffix == ".sock":
            if is_dead_socket(path):
                remove = partial(path.unlink, missing_ok=True)
                yield UnusedFile("the socket of a process that is gone", str(path), 0, remove)
        elif path.is_dir() and path.suffix != ".partial" and _get_modified_time(path) < limit:
            remove = partial(remove_if_unused, path)
            yield UnusedFile("a copy of a checkpoint", str(path), compute_tree_size(path), remove)
    for path in list_work_directories():
        if _is_unused_work_directory(path, limit):
            what = "the work folder of a run on remote storage"
            remove = partial(_remove_work_directory, path, limit)
            yield UnusedFile(what, str(path), compute_tree_size(path), remove)


def is_dead_socket(path: Path) -> bool:
    """Whether a socket is that of a process that is gone."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            return True
        # Any other error, as of a socket with too many waiting, does not say that nobody is there.
        except OSError:
            return False
    return False


def _is_unused_work_directory(path: Path, limit: float) -> bool:
    """Whether this is a work folder without anything of the user's, old, and nobody is at it.

    On a node that is not the driver's nobody holds a journal in there: a rank holds its log.
    """
    directory = RunDirectory(path)
    if not _WORK_DIRECTORY_NAME.fullmatch(path.name) or path.is_symlink():
        return False
    if directory.staging.list_moved() or not _WORK_DIRECTORY_FILES.issuperset(os.listdir(path)):
        return False
    below = (f"{folder}/{name}" for folder, _, files in os.walk(path) for name in (*files, "."))
    if any(_get_modified_time(each) >= limit for each in below):
        return False
    return not is_locked(directory.journal_path) and not has_open_files(path)


def _remove_work_directory(path: Path, limit: float) -> None:
    if path.exists() and _is_unused_work_directory(path, limit):
        _remove_completely(path)


def _get_modified_time(path: str | Path) -> float:
    """Say when something was last changed; never, if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_mtime
    return float("inf")
