"""Read, write, and list files below a path that is local or on a remote filesystem."""

from __future__ import annotations

import os
from pathlib import Path

from drawbar._storage.contents import is_directory
from drawbar._storage.files import read_regular_file, write_atomically
from drawbar._storage.remote_path import RemotePath


def get_fs_path(path: Path | RemotePath) -> str:
    """Return a path as it is on its filesystem, without a scheme."""
    return path.fs_path if isinstance(path, RemotePath) else str(path)


def suggest_remote(path: Path | RemotePath) -> str:
    """Return a sentence for an error about a path: for a missing local one, it may be remote."""
    if isinstance(path, RemotePath) or path.exists():
        return ""
    return " If it is in remote storage, pass its URI, or its filesystem."


def read_file_or_none(path: Path | RemotePath, name: str, start: int = 0) -> bytes | None:
    """Read a file of a run or checkpoint from an offset; return None if it does not exist.

    Raises:
        OSError: The file cannot be read, or is not a regular file; see `read_regular_file`.
    """
    if isinstance(path, RemotePath):
        data = path.read_or_none(name)
        return None if data is None else data[start:]
    try:
        return read_regular_file(path / name, start)
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_file(
    path: Path | RemotePath,
    name: str,
    data: bytes,
    *,
    durable: bool = False,
    temp_directory: Path | None = None,
) -> None:
    """Write a file of a run or checkpoint atomically.

    Args:
        path: Directory of the run or checkpoint.
        name: Name of the file in it.
        data: New content.
        durable: Whether a local file must be on disk when this returns.
        temp_directory: Directory for the temporary file of a local one; see `write_atomically`.

    Raises:
        OSError: The file cannot be written; the message has the path and the size.
    """
    if isinstance(path, RemotePath):
        path.write(name, data)
    else:
        write_atomically(path / name, data, durable=durable, temp_directory=temp_directory)


def list_directories(path: Path | RemotePath) -> list[str]:
    """Return the sorted names of the direct subdirectories, without hidden local ones.

    Raises:
        OSError: The directory cannot be read. A missing one is an error only if it is local.
        CheckpointError: A remote storage lists a directory outside this one.
    """
    if isinstance(path, RemotePath):
        return path.list_directories()
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if is_directory(entry)]
    return sorted(name for name in names if not name.startswith("."))
