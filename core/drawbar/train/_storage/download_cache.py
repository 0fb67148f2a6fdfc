"""One local copy of a remote directory per node, shared by the processes that read it at a time.

Each reader holds a shared lock on the copy's lock file. Who finds no copy takes the lock for itself
alone and downloads; who can take it so when it leaves was the last, and removes the copy and the
lock file. Locks go with their process, so a killed reader holds nobody up; the copy that it leaves
may be out of date, and is removed by the next one that comes.

They lie in a folder of temporary files that this user alone may enter: whoever else may write to
/tmp could put another model where one is expected.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle

from drawbar.train._errors import CheckpointError
from drawbar.train._storage.contents import MANIFEST_FILE
from drawbar.train._storage.files import is_current_file, remove_tree
from drawbar.train._storage.filesystem import RemotePath


@contextmanager
def use_cached_copy(folder: RemotePath) -> Iterator[Path]:
    """Give a local copy of a remote directory, downloaded unless another process has it already.

    Raises:
        CheckpointError: The folder that copies lie in is not this user's own.
    """
    copy = get_user_temp_directory() / _compute_cache_key(folder)
    remove_if_unused(copy)
    with _CopyLock(copy) as lock:
        try:
            lock.acquire_shared(lambda: _download(folder, copy))
            yield copy
        finally:
            lock.remove_if_unused()


def keep_copy(identity: str, download: Callable[[Path], None]) -> Path:
    """Give a copy that stays, made by the first process of this node that asks by this identity."""
    copy = get_user_temp_directory() / f"checkpoint_{identity}"
    lock = copy.with_suffix(".lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not copy.exists():
            partial = copy.with_suffix(".partial")
            remove_tree(partial)  # of one who was killed while this one waited
            partial.mkdir()
            download(partial)
            # By a rename, so that a copy that is there is whole: a killed process leaves a
            # `.partial`.
            os.rename(partial, copy)
        lock.unlink(missing_ok=True)  # whoever waits for it finds the copy
    finally:
        os.close(descriptor)
    return copy


def remove_if_unused(copy: Path) -> None:
    """Remove a copy, or what a failed download has left of it, unless somebody reads it."""
    with _CopyLock(copy) as lock:
        lock.remove_if_unused()


def get_user_temp_directory() -> Path:
    """Give the folder of temporary files that this user alone may enter.

    Raises:
        CheckpointError: Somebody else has made it, or may enter it.
    """
    folder = Path(tempfile.gettempdir()) / f"drawbar-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # Not `stat`: somebody else may have put a link there.
    found = os.lstat(folder)
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(found.st_mode) & 0o077:
        raise CheckpointError(
            f"{folder} is to hold copies of checkpoints, and must be a folder that user "
            f"{os.geteuid()} alone may enter; found {stat.filemode(found.st_mode)} of user "
            f"{found.st_uid}. Remove it, or set TMPDIR to a folder of your own"
        )
    return folder


def _compute_cache_key(folder: RemotePath) -> str:
    """Give what is equal in all processes for the same checkpoint, and for another one is not.

    A name may have been given anew, while the checkpoint that had it is still being read.
    """
    key = f"{folder.fs_path} ".encode()
    key += folder.read_or_none(MANIFEST_FILE) or b""
    try:
        key += cloudpickle.dumps(folder.filesystem)
    except Exception:  # it cannot be in another process: the copy is this one's alone
        key += f"{os.getpid()} {folder.filesystem.type_name}".encode()
    return hashlib.sha256(key).hexdigest()[:24]


def _download(folder: RemotePath, copy: Path) -> None:
    partial = copy.with_suffix(".partial")
    remove_tree(partial)  # of one who was killed while this one waited
    partial.mkdir()
    folder.download_files(partial, folder.list_files())
    os.rename(partial, copy)


class _CopyLock:
    """The lock of one copy. Who holds it alone may remove its file, so whoever gets it looks."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy
        self._path = copy.with_suffix(".lock")
        self._descriptor = -1

    def __enter__(self) -> _CopyLock:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def acquire_shared(self, download: Callable[[], None]) -> None:
        """Hold the lock together with other readers, with the copy there; `make` makes it.

        Between giving up the exclusive lock and having the shared one, another reader that leaves
        may remove both again: then it is made once more.
        """
        while True:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            if self._is_current() and self._copy.exists():
                return
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if not self._is_current():
                os.close(self._descriptor)
                self.__enter__()
            elif not self._copy.exists():
                download()

    def _is_current(self) -> bool:
        return is_current_file(self._path, self._descriptor)

    def remove_if_unused(self) -> None:
        """Remove the copy, or what a failed download left, and the lock, unless somebody reads."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if self._is_current():
            remove_tree(self._copy)
            remove_tree(self._copy.with_suffix(".partial"))
            self._path.unlink()
