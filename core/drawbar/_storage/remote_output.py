"""Write files to remote filesystems without storing incomplete ones.

Streams of pyarrow and fsspec store the data written so far when a `with` block ends, also if it
ends with an exception, and replace an older file with it. How a write is abandoned depends on the
filesystem:

| filesystem | during the write | after an exception |
|---|---|---|
| local directories, SFTP | a temporary file, which is renamed | delete the temporary file |
| object stores of fsspec | no object before the stream is closed | abort the upload |
| object stores of pyarrow | no object before the stream is closed | delete the incomplete object |
| the same, with `keeps_older` | a temporary object, which is copied | delete the temporary object |
| others, such as HDFS | an incomplete file | delete the incomplete file |
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from drawbar._storage.fsspec_files import get_fsspec_filesystem

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from pyarrow.fs import FileSystem

FLAT_FILESYSTEMS = ("s3", "gcs", "abfs")
"""Object stores of pyarrow, which have no directories."""

_RENAMING_PROTOCOLS = {"sftp", "ssh"}  # a rename replaces an existing file


@contextlib.contextmanager
def open_output(
    filesystem: FileSystem, path: str, *, keeps_older: bool = False
) -> Iterator[IO[bytes]]:
    """Open a file for writing that is stored only if the block ends without an exception.

    After an exception, there is the older file of this path, or none.

    Args:
        filesystem: Filesystem of the file.
        path: Path of the file.
        keeps_older: Whether object stores of pyarrow keep the older file after an exception. The
            file must have less than 5 GB, because it is copied within the store.
    """
    if can_rename(filesystem) or (keeps_older and filesystem.type_name in FLAT_FILESYSTEMS):
        with _open_temporary(filesystem, path) as stream:
            yield stream
        return
    stream = _open_stream(filesystem, path)
    try:
        yield stream
    except BaseException:
        if not _discard(stream):
            with contextlib.suppress(Exception):
                stream.close()  # if this fails, the older object was not replaced
                filesystem.delete_file(path)
        raise
    try:
        stream.close()
    except BaseException:
        _discard(stream)
        raise


@contextlib.contextmanager
def _open_temporary(filesystem: FileSystem, path: str) -> Iterator[IO[bytes]]:
    directory, _, name = path.rpartition("/")
    # Only the start of a long name, since file names have a maximum length.
    short_name = os.fsencode(name)[:100].decode(errors="ignore")
    temporary = f"{directory}/.drawbar-{short_name}.{secrets.randbits(32)}.tmp"
    try:
        with _open_stream(filesystem, temporary) as stream:
            yield stream
        _rename(filesystem, temporary, path)
    except BaseException:
        with contextlib.suppress(Exception):
            filesystem.delete_file(temporary)
        raise


def _rename(filesystem: FileSystem, source: str, target: str) -> None:
    wrapped = get_fsspec_filesystem(filesystem)
    if wrapped is not None:
        wrapped.mv(source, target)
    elif filesystem.type_name in FLAT_FILESYSTEMS:
        filesystem.copy_file(source, target)
        filesystem.delete_file(source)
    else:
        filesystem.move(source, target)


def _open_stream(filesystem: FileSystem, path: str) -> Any:
    wrapped = get_fsspec_filesystem(filesystem)
    if wrapped is not None:
        return wrapped.open(path, mode="wb")
    return filesystem.open_output_stream(path, compression=None)


def _discard(stream: Any) -> bool:
    """Abort the upload of a stream; return False if its filesystem does not support this."""
    if not hasattr(stream, "discard") or not hasattr(stream, "autocommit"):
        return False  # not a fsspec.spec.AbstractBufferedFile
    with contextlib.suppress(Exception):  # raise the exception that ended the write
        stream.discard()
    stream.closed = True  # otherwise, the destructor stores the data
    return True


def can_rename(filesystem: FileSystem) -> bool:
    """Return True if the filesystem can replace a file by a rename."""
    wrapped = get_fsspec_filesystem(filesystem)
    if wrapped is not None:
        return _can_fsspec_rename(wrapped)
    base = getattr(filesystem, "base_fs", None)  # of a SubTreeFileSystem
    return filesystem.type_name == "local" if base is None else can_rename(base)


def _can_fsspec_rename(filesystem: AbstractFileSystem) -> bool:
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    if isinstance(filesystem, DirFileSystem):
        return _can_fsspec_rename(filesystem.fs)
    protocol = filesystem.protocol
    protocols = {protocol} if isinstance(protocol, str) else {*protocol}
    return isinstance(filesystem, LocalFileSystem) or bool(protocols & _RENAMING_PROTOCOLS)
