"""List and delete files of fsspec filesystems.

pyarrow's wrapper of fsspec is not used for two reasons:

- It uses `isdir`, `exists`, and `find` of fsspec, which return False or nothing if the store fails,
  for example with HTTP status 503. A run would appear to have no checkpoints. A failed request of
  `iter_fsspec_infos` raises an error.
- It uses `rm`, in which `*`, `?`, and `[` of a path are wildcards. It would delete files of other
  runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drawbar._storage.contents import check_relative_path

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from pyarrow.fs import FileInfo, FileSystem


def get_fsspec_filesystem(filesystem: FileSystem) -> AbstractFileSystem | None:
    """Return the fsspec filesystem that a pyarrow filesystem wraps; None if it wraps none."""
    return getattr(getattr(filesystem, "handler", None), "fs", None)


def iter_fsspec_infos(
    filesystem: AbstractFileSystem, path: str, *, is_recursive: bool
) -> Iterator[FileInfo]:
    """Iterate over the files and directories below a directory; none if it does not exist.

    Raises:
        CheckpointError: The store lists an entry outside the directory.
        NotADirectoryError: `path` is a file.
        OSError: The store failed.
    """
    from pyarrow.fs import FileInfo, FileType

    types = {"file": FileType.File, "directory": FileType.Directory}
    directories = [path]
    while directories:
        directory = directories.pop()
        for entry in _list_directory(filesystem, directory):
            entry_path, kind = entry["name"], entry["type"]
            if _is_same(entry_path, directory):
                if kind == "file":
                    raise NotADirectoryError(f"{directory} is a file")
                continue  # some stores list the directory itself
            # Before the entry is listed: a directory such as ".." would never end.
            check_relative_path(entry_path.strip("/").removeprefix(path.strip("/")).strip("/"))
            is_file = kind == "file"
            yield FileInfo(
                entry_path,
                types.get(kind, FileType.Unknown),
                size=entry["size"] if is_file else None,
            )
            if is_recursive and kind == "directory":
                directories.append(entry_path)


def _list_directory(filesystem: AbstractFileSystem, directory: str) -> list[dict[str, Any]]:
    # Other processes write to the same store.
    filesystem.invalidate_cache(directory)
    try:
        entries: list[dict[str, Any]] = filesystem.ls(directory, detail=True)
    except FileNotFoundError:
        return []
    return entries


def _is_same(path: str, other: str) -> bool:
    return path.strip("/") == other.strip("/")


def delete_file(filesystem: FileSystem, path: str) -> None:
    """Delete a file.

    Raises:
        FileNotFoundError: The file does not exist. Some stores do not raise it.
        OSError: The store failed.
    """
    wrapped = get_fsspec_filesystem(filesystem)
    if wrapped is not None and _has_wildcards(path):
        wrapped.rm_file(path)
    else:
        filesystem.delete_file(path)


def delete_directory(filesystem: FileSystem, path: str) -> None:
    """Delete a directory and everything in it.

    Raises:
        FileNotFoundError: The directory does not exist. Some stores do not raise it.
        OSError: The store failed.
    """
    wrapped = get_fsspec_filesystem(filesystem)
    if wrapped is None or not _has_wildcards(path):
        filesystem.delete_dir(path)
        return
    infos = list(iter_fsspec_infos(wrapped, path, is_recursive=True))
    for info in infos:
        if info.is_file:
            wrapped.rm_file(info.path)
    directories = [info.path for info in infos if not info.is_file]
    for directory in (*sorted(directories, key=len, reverse=True), path):
        if wrapped.isdir(directory):  # object stores have no empty directories
            wrapped.rmdir(directory)


def _has_wildcards(path: str) -> bool:
    return any(character in path for character in "*?[")
