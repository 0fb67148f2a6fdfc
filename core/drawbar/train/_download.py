"""One local copy of a remote directory per node, shared by the processes that read it at a time.

Each reader holds a shared lock on the copy's lock file. Who finds no copy takes the lock for itself
alone and downloads; who can take it so when it leaves was the last, and removes the copy. Locks go
with their process, so a killed reader holds nobody up.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle

from drawbar.train._filesystem import Folder


@contextmanager
def shared_copy(folder: Folder) -> Iterator[Path]:
    """Give a local copy of a remote directory, downloaded unless another process has it already."""
    copy = Path(tempfile.gettempdir()) / f"drawbar-copy-{_identity(folder)}"
    descriptor = os.open(copy.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _download_once(folder, copy, descriptor)
        yield copy
    finally:
        _remove_if_last(copy, descriptor)
        os.close(descriptor)


def _identity(folder: Folder) -> str:
    """Give what is equal in all processes for the same place, and for different places is not."""
    key = f"{os.geteuid()} {folder.path} ".encode()
    try:
        key += cloudpickle.dumps(folder.filesystem)
    except Exception:  # it cannot be in another process: the copy is this one's alone
        key += f"{os.getpid()} {folder.filesystem.type_name}".encode()
    return hashlib.sha256(key).hexdigest()[:24]


def _download_once(folder: Folder, copy: Path, descriptor: int) -> None:
    """Take the lock, shared, with a whole copy there.

    Between giving up the exclusive lock and having the shared one, another reader that leaves may
    remove the copy again: then it is downloaded once more.
    """
    while True:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if copy.exists():
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not copy.exists():
            partial = copy.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            folder.download(partial, folder.list_files())
            os.rename(partial, copy)


def _remove_if_last(copy: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # somebody else reads it
    shutil.rmtree(copy, ignore_errors=True)
