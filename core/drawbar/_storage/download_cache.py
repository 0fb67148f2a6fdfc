"""Cache downloaded checkpoints once per node and share them between processes.

Each reader holds a shared lock on the lock file of a copy. A reader that finds no copy takes the
lock exclusively and downloads. A leaving reader that gets the exclusive lock was the last one, and
removes the copy and the lock file. Locks are released with their process, so a killed reader does
not block others. The copy that it leaves behind can be out of date; the next reader removes it.

Copies are in a temporary directory that only this user can enter: any other user with write access
to /tmp could otherwise substitute another model.
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

from drawbar._process.errors import CheckpointError
from drawbar._storage.contents import MANIFEST_FILE
from drawbar._storage.files import is_current_file, remove_tree
from drawbar._storage.remote_path import RemotePath, download_files


@contextmanager
def use_cached_copy(directory: RemotePath) -> Iterator[Path]:
    """Provide a local copy of a remote directory, and download it unless a process has a copy.

    Yields:
        Path of the copy.

    Raises:
        CheckpointError: The directory for copies belongs to, or is open to, another user.
    """
    copy = get_user_temp_directory() / _compute_cache_key(directory)
    remove_if_unused(copy)
    with _CopyLock(copy) as lock:
        try:
            lock.acquire_shared(
                lambda target: download_files(directory, target, directory.list_files())
            )
            yield copy
        finally:
            lock.remove_if_unused()


def keep_copy(identity: str, download: Callable[[Path], None]) -> Path:
    """Return a permanent copy, downloaded by the first process of this node with this identity."""
    copy = get_user_temp_directory() / f"checkpoint_{identity}"
    with _CopyLock(copy) as lock:
        lock.acquire_shared(download)
        lock.path.unlink(missing_ok=True)  # processes that wait for it find the copy
    return copy


def remove_if_unused(copy: Path) -> None:
    """Remove a copy, or the remains of a failed download, unless a process reads it."""
    with _CopyLock(copy) as lock:
        lock.remove_if_unused()


def get_user_temp_directory() -> Path:
    """Return the directory for temporary files that only this user can enter.

    Raises:
        CheckpointError: Another user created the directory, or can enter it.
    """
    directory = Path(tempfile.gettempdir()) / f"drawbar-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    # lstat, because another user may have put a link there.
    status = os.lstat(directory)
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(status.st_mode) & 0o077:
        raise CheckpointError(
            f"{directory} stores copies of checkpoints, so only user {os.geteuid()} may have "
            f"access to it, but its owner is user {status.st_uid} and its mode is "
            f"{stat.filemode(status.st_mode)}. Remove it, or set TMPDIR to a private directory."
        )
    return directory


def _compute_cache_key(directory: RemotePath) -> str:
    """Return a key that is the same in all processes for one checkpoint, and unique to it.

    The key includes the manifest, because a new checkpoint can reuse a name while the old one is
    still being read.
    """
    key = f"{directory.fs_path} ".encode()
    key += directory.read_or_none(MANIFEST_FILE) or b""
    try:
        key += cloudpickle.dumps(directory.filesystem)
    except Exception:  # not serializable: the copy is for this process only
        key += f"{os.getpid()} {directory.filesystem.type_name}".encode()
    return hashlib.sha256(key).hexdigest()[:24]


class _CopyLock:
    """Lock of one copy. Its exclusive holder may delete the lock file, so users check for it."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy
        self.path = copy.with_suffix(".lock")
        self._descriptor = -1

    def __enter__(self) -> _CopyLock:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def acquire_shared(self, download: Callable[[Path], object]) -> None:
        """Acquire the shared lock and make sure that the copy exists.

        The rename makes sure that an existing copy is complete: a killed process leaves only a
        `.partial` directory.

        After the exclusive lock is released and before the shared one is taken, another reader
        can leave and remove both. The copy is then downloaded again.
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
                partial = self._copy.with_suffix(".partial")
                remove_tree(partial)  # of a process that was killed while this one waited
                partial.mkdir()
                download(partial)
                os.rename(partial, self._copy)

    def _is_current(self) -> bool:
        return is_current_file(self.path, self._descriptor)

    def remove_if_unused(self) -> None:
        """Remove the copy, a partial download, and the lock, unless a process reads the copy."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if self._is_current():
            remove_tree(self._copy)
            remove_tree(self._copy.with_suffix(".partial"))
            self.path.unlink()
