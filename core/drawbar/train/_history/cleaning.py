"""What runs leave behind and nobody needs any more: found first, removed only when told."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from drawbar.train._history.events import CheckpointDeleted, JournaledEvent, RunStarted
from drawbar.train._history.journal import Journal
from drawbar.train._history.ranking import checkpoint_config_of, to_delete
from drawbar.train._settings.run_config import CheckpointConfig
from drawbar.train._storage import upkeep
from drawbar.train._storage.files import remove_tree, tree_size
from drawbar.train._storage.journal_file import is_held
from drawbar.train._storage.remote_checkpoints import RemoteCheckpoints
from drawbar.train._storage.run_directory import RunDirectory, work_folders
from drawbar.train._storage.shared_copy import own_folder, remove_if_unread


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
        if place.is_dir() and any(place.iterdir()):
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
        yield from _surplus(directory, replace(checkpoint_config_of(starts[-1]), num_to_keep=keep))


def _surplus(directory: RunDirectory, rule: CheckpointConfig) -> Iterator[Leftover]:
    store = directory.checkpoints
    for manifest in to_delete(store.committed(), rule):
        yield Leftover(
            "an old checkpoint",
            str(store.place(manifest.name)),
            manifest.nbytes,
            partial(_delete_checkpoint, directory, manifest.name),
        )


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
        remove_tree(place)


def _delete_checkpoint(directory: RunDirectory, name: str) -> None:
    with _held(directory) as journal:
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
            if not _is_answered(path):
                yield Leftover("the socket of a process that is gone", str(path), 0, path.unlink)
        elif path.is_dir() and path.suffix != ".partial" and _is_older(path, limit):
            remove = partial(remove_if_unread, path)
            yield Leftover("a copy of a checkpoint", str(path), tree_size(path), remove)
    for path in work_folders():
        if _is_older(path, limit) and not is_held(RunDirectory(path).journal):
            what = "the work folder of a run on remote storage"
            yield Leftover(what, str(path), tree_size(path), partial(remove_tree, path))


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        # Any other error, as of a socket with too many waiting, does not say that nobody is there.
        except ConnectionRefusedError:
            return False
    return True


def _is_older(path: Path, limit: float) -> bool:
    try:
        return os.lstat(path).st_mtime < limit
    except FileNotFoundError:
        return False
