"""Compare filesystems, also of different threads and processes, and list their directories.

`isdir`, `exists`, and `find` of fsspec return False or nothing if the store fails, for example with
HTTP status 503. pyarrow's wrapper uses them, so that a run would appear to have no checkpoints. A
failed request of `iter_fsspec_infos` raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drawbar.train._storage.contents import check_relative_path

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from pyarrow.fs import FileInfo, FileSystem

_ENDPOINT_SETTINGS = (  # pyarrow's and fsspec's settings that identify the server of a filesystem
    "account_name",
    "blob_storage_authority",
    "endpoint_override",
    "endpoint_url",
    "host",
    "port",
)


def is_same_filesystem(one: FileSystem, other: FileSystem) -> bool:
    """Return True if two pyarrow filesystems are equal.

    Wrapped fsspec filesystems compare equal only if the same thread created them, so their
    constructor arguments are compared.
    """
    return (
        bool(one.equals(other))
        or _get_constructor_key(one) == _get_constructor_key(other) is not None
    )


def _get_constructor_key(filesystem: FileSystem) -> tuple[object, ...] | None:
    wrapped = get_fsspec_filesystem(filesystem)
    if wrapped is None or not hasattr(wrapped, "storage_options"):
        return None
    return type(wrapped), wrapped.storage_args, wrapped.storage_options


def describe_endpoint(filesystem: FileSystem | AbstractFileSystem) -> str:
    """Return the server, account, or subtree of a filesystem; "" if its type has only one.

    The result is the same in every process, and does not depend on credentials, which can change
    between runs.
    """
    wrapped = getattr(getattr(filesystem, "handler", None), "fs", filesystem)
    for inner, path in (("base_fs", "base_path"), ("fs", "path")):
        if hasattr(wrapped, inner):
            return (
                f"{describe_endpoint(getattr(wrapped, inner))} {getattr(wrapped, path, '')}".strip()
            )
    return " ".join(sorted(_iter_endpoints(_get_constructor_settings(wrapped))))


def _get_constructor_settings(filesystem: FileSystem | AbstractFileSystem) -> dict[str, object]:
    if hasattr(filesystem, "storage_options"):
        return dict(filesystem.storage_options)
    try:
        (settings,) = filesystem.__reduce__()[1]
        return dict(settings)
    except (TypeError, ValueError):  # not serializable, or without settings
        return {}


def _iter_endpoints(settings: dict[str, object]) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict):  # s3fs also accepts the endpoint in client_kwargs
            yield from _iter_endpoints(value) if name == "client_kwargs" else ()
        elif name in _ENDPOINT_SETTINGS and value:
            yield f"{name}={value}"


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
