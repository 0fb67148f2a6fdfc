"""One local copy of a remote directory per node, shared by the processes that read it at a time.

Each reader holds a shared lock on the copy's lock file. Who finds no copy takes the lock for itself
alone and downloads; who can take it so when it leaves was the last, and removes the copy. Locks go
with their process, so a killed reader holds nobody up; the copy that it leaves may be out of date,
and is removed by the next one that comes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle

from drawbar.train import _files
from drawbar.train._filesystem import Folder


@contextmanager
def shared_copy(folder: Folder) -> Iterator[Path]:
    """Give a local copy of a remote directory, downloaded unless another process has it already."""
    copy = Path(tempfile.gettempdir()) / f"drawbar-copy-{_identity(folder)}"
    descriptor = os.open(copy.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _remove_if_unread(copy, descriptor)
        _download_once(folder, copy, descriptor)
        yield copy
    finally:
        _remove_if_unread(copy, descriptor)
        os.close(descriptor)


def _identity(folder: Folder) -> str:
    """Give what is equal in all processes for the same checkpoint, and for another one is not.

    A name may have been given anew, while the checkpoint that had it is still being read.
    """
    key = f"{os.geteuid()} {folder.path} ".encode()
    key += folder.read_if_there(_files.MANIFEST) or b""
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
            _files.remove_tree(partial)  # of one who was killed while this one waited
            partial.mkdir()
            folder.download(partial, folder.list_files())
            os.rename(partial, copy)


def _remove_if_unread(copy: Path, descriptor: int) -> None:
    """Remove the copy, or what a download that failed has left of it, unless somebody reads it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    for left in (copy, copy.with_suffix(".partial")):
        _files.remove_tree(left)
