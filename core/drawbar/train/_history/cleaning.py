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

from drawbar.train._history.events import CheckpointDeleted, JournaledEvent, RunStarted
from drawbar.train._history.journal import Journal, committed
from drawbar.train._history.ranking import checkpoint_config_of, to_delete
from drawbar.train._settings.run_config import CheckpointConfig
from drawbar.train._storage import upkeep
from drawbar.train._storage.contents import is_outside, ways_to
from drawbar.train._storage.files import is_open_below, remove_tree, tree_size
from drawbar.train._storage.journal_file import is_held
from drawbar.train._storage.manifest import Manifest, read_manifest
from drawbar.train._storage.own_files import OWN_NAMES
from drawbar.train._storage.remote_checkpoints import RemoteCheckpoints
from drawbar.train._storage.run_directory import RunDirectory, work_folders
from drawbar.train._storage.shared_copy import own_folder, remove_if_unread

_WORK_FOLDER = re.compile(r".+-[0-9a-f]{12}")
_IN_WORK_FOLDER = frozenset({*OWN_NAMES, ".staging", ".workers", ".bring.lock"})


@dataclass(frozen=True)
class Leftover:
    """Something that may go.

    Attributes:
        what: Which kind of thing it is.
        path: Where it lies.
        nbytes: Bytes that are free when it is gone.
    """

    what: str
    path: str
    nbytes: int
    _remove: Callable[[], object]

    def remove(self) -> None:
        """Remove it.

        Raises:
            JournalLockedError: Its run has begun to go on.
            OSError: The storage refuses.
        """
        self._remove()


def leftovers_of(
    directory: RunDirectory, events: tuple[JournaledEvent, ...], keep: int | None
) -> Iterator[Leftover]:
    """Give what may go of a run that does not go on; see `RunRecord.leftovers`."""
    if not events or is_held(directory.journal):
        return
    for place in (directory.staging.path, directory.path / ".workers"):
        if _holds_something(place):
            what = "what was never committed"
            yield Leftover(what, str(place), tree_size(place), partial(_sweep, directory, place))
    if directory.folder is not None:
        # There is no staging area: what was never committed lies beside the checkpoints.
        store = RemoteCheckpoints(directory.folder)
        for name in store.leftovers():
            folder = store.home / name
            size = sum(file.size for file in folder.list_files())
            yield Leftover("what was never committed", str(folder), size, folder.delete)
    starts = [event for event in events if isinstance(event, RunStarted)]
    if keep is not None and starts:
        rule = replace(checkpoint_config_of(starts[-1]), num_to_keep=keep)
        yield from _surplus(directory, committed(events), rule)


def _holds_something(folder: Path) -> bool:
    """Whether this is a folder, and no link to one, with something in it that this user sees."""
    try:
        return stat.S_ISDIR(os.lstat(folder).st_mode) and any(folder.iterdir())
    except (FileNotFoundError, PermissionError):
        return False


def _surplus(
    directory: RunDirectory, names: set[str], rule: CheckpointConfig
) -> Iterator[Leftover]:
    """Give old ones of the checkpoints that the run has committed under these names.

    A copy that the user has made of one is the user's, and so is what lies elsewhere.
    """
    store = directory.checkpoints
    own = [each for each in store.legible()[0] if each.name in names]
    for manifest in to_delete(own, rule):
        if is_outside(manifest.name) or _is_behind_link(directory, manifest.name):
            continue
        yield Leftover(
            "an old checkpoint",
            str(store.place(manifest.name)),
            manifest.nbytes,
            partial(_delete_checkpoint, directory, manifest),
        )


def _is_behind_link(directory: RunDirectory, name: str) -> bool:
    return any((directory.path / way).is_symlink() for way in ways_to(name))


@contextmanager
def _held(directory: RunDirectory) -> Iterator[Journal]:
    """Hold a run's journal, so that nobody else goes on with the run meanwhile."""
    journal = Journal(directory.journal)
    try:
        directory.files.catch_up(journal)
        yield journal
        directory.files.publish()
    finally:
        journal.close()
    upkeep.leave(directory)


def _sweep(directory: RunDirectory, place: Path) -> None:
    with _held(directory):
        upkeep.set_aside(directory)  # what was handed over is nowhere else
        _remove_whole(place)


def _remove_whole(place: Path) -> None:
    """Delete a folder.

    Raises:
        PermissionError: Some of it stays.
    """
    remove_tree(place)
    if os.path.lexists(place):
        raise PermissionError(errno.EACCES, "this user cannot delete all of it", str(place))


def _delete_checkpoint(directory: RunDirectory, manifest: Manifest) -> None:
    name = manifest.name
    with _held(directory) as journal:
        there = read_manifest(directory.checkpoints.place(name))
        if there is None or there.time != manifest.time:
            return  # somebody else was faster, or a new run has one of this name
        directory.staging.path.mkdir(parents=True, exist_ok=True)
        journal.append(CheckpointDeleted(time=time.time(), name=name))
        directory.checkpoints.delete(name)


def leftovers_here(older_than: float) -> Iterator[Leftover]:
    """Give what runs and readers of checkpoints have left on this machine.

    That is: copies of remote checkpoints that nobody reads, copies that `to_directory()` has made,
    sockets of processes that are gone, and work folders of runs on remote storage that do not go
    on. Of copies and work folders that somebody may still use or want, only old ones.

    Args:
        older_than: In seconds.
    """
    limit = time.time() - older_than
    for path in sorted(own_folder().iterdir()):
        if path.suffix == ".sock":
            if is_unanswered(path):
                remove = partial(path.unlink, missing_ok=True)
                yield Leftover("the socket of a process that is gone", str(path), 0, remove)
        elif path.is_dir() and path.suffix != ".partial" and _changed(path) < limit:
            remove = partial(remove_if_unread, path)
            yield Leftover("a copy of a checkpoint", str(path), tree_size(path), remove)
    for path in work_folders():
        if _is_spent(path, limit):
            what = "the work folder of a run on remote storage"
            remove = partial(_remove_spent, path, limit)
            yield Leftover(what, str(path), tree_size(path), remove)


def is_unanswered(path: Path) -> bool:
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


def _is_spent(path: Path, limit: float) -> bool:
    """Whether this is a work folder without anything of the user's, old, and nobody is at it.

    On a node that is not the driver's nobody holds a journal in there: a rank holds its log.
    """
    directory = RunDirectory(path)
    if not _WORK_FOLDER.fullmatch(path.name) or path.is_symlink():
        return False
    if directory.staging.handed_over() or not _IN_WORK_FOLDER.issuperset(os.listdir(path)):
        return False
    below = (f"{folder}/{name}" for folder, _, files in os.walk(path) for name in (*files, "."))
    if any(_changed(each) >= limit for each in below):
        return False
    return not is_held(directory.journal) and not is_open_below(path)


def _remove_spent(path: Path, limit: float) -> None:
    if path.exists() and _is_spent(path, limit):
        _remove_whole(path)


def _changed(path: str | Path) -> float:
    """Say when something was last changed; never, if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return os.lstat(path).st_mtime
    return float("inf")
