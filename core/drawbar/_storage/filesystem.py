"""Resolve paths and URIs to local paths and directories on remote filesystems.

pyarrow and fsspec are imported only in this package, and only for paths that need them.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from drawbar._storage.fsspec_files import get_fsspec_filesystem
from drawbar._storage.remote_path import RemotePath
from drawbar._storage.storage_path import LocalPath, StoragePath, import_pyarrow_fs
from drawbar._storage.uris import get_local_path, quote_uri, unquote_path

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from pyarrow.fs import FileSystem

    AnyFileSystem: TypeAlias = FileSystem | AbstractFileSystem
    """Filesystem that users pass: pyarrow's, or fsspec's, which is wrapped as pyarrow's."""
else:
    AnyFileSystem = Any  # annotations can be evaluated without pyarrow and fsspec


def resolve_path(
    path: str | os.PathLike[str], filesystem: AnyFileSystem | None = None
) -> StoragePath:
    """Return the local or remote path that a path or URI refers to.

    Args:
        path: Local path, `file://...`, or URI that pyarrow or fsspec supports.
        filesystem: `pyarrow.fs.FileSystem` or fsspec filesystem. If it is set, a scheme in `path`
            is ignored.

    Raises:
        ImportError: The package for the URI is not installed; the message names it.
        ValueError: The scheme is unknown, or the path is empty.
        TypeError: `filesystem` is not a filesystem.
    """
    text = os.fspath(path)
    if not text:
        raise ValueError("The path of a directory must not be empty.")
    if filesystem is not None:
        pyarrow_filesystem = to_pyarrow(filesystem)
        if "://" in text:
            is_quoted = get_fsspec_filesystem(pyarrow_filesystem) is None
            text = unquote_path(text) if is_quoted else text.partition("://")[2]
        return _make_path(text, pyarrow_filesystem, "")
    if text.startswith(("file:/", "local:/")):
        _check_local_uri(text)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if not scheme:
        return _make_local_path(text)
    if scheme in ("file", "local"):
        return LocalPath(get_local_path(text)).absolute()
    return _parse_uri(text)


def _check_local_uri(uri: str) -> None:
    parts = urlsplit(uri)
    if "://" in uri and parts.netloc in ("", "localhost"):
        return
    path = f"/{parts.netloc}{parts.path}" if parts.netloc else parts.path
    raise ValueError(
        f"The URI {uri!r} of a local path must have three slashes. For {path}, use "
        f"'{parts.scheme}://{path}' or the path itself."
    )


def _make_path(path: str, filesystem: FileSystem, uri: str) -> StoragePath:
    if filesystem.type_name == "local":
        return _make_local_path(path)
    return RemotePath(path.rstrip("/"), filesystem, uri)


def _make_local_path(path: str) -> LocalPath:
    try:
        return LocalPath(path).expanduser().absolute()
    except RuntimeError:
        user = path.partition("/")[0]
        raise ValueError(
            f"The path {path!r} refers to the home directory of user {user[1:]!r}, who does not "
            "exist on this machine. Use an absolute path."
        ) from None


def to_pyarrow(filesystem: AnyFileSystem) -> FileSystem:
    """Return a filesystem as a `pyarrow.fs.FileSystem`; fsspec filesystems are wrapped."""
    arrow = import_pyarrow_fs()
    if isinstance(filesystem, arrow.FileSystem):
        return filesystem
    fsspec = sys.modules.get("fsspec")  # already imported if `filesystem` is one of its filesystems
    if fsspec is None or not isinstance(filesystem, fsspec.AbstractFileSystem):
        raise TypeError(
            "filesystem must be a pyarrow.fs.FileSystem or an fsspec.AbstractFileSystem, not "
            f"{filesystem!r} ({type(filesystem).__name__})."
        )
    return arrow.PyFileSystem(arrow.FSSpecHandler(filesystem))


def _parse_uri(uri: str) -> StoragePath:
    arrow = import_pyarrow_fs()
    try:
        # pyarrow first, because its clients need no other package; fsspec supports more schemes.
        quoted_uri = quote_uri(uri)
        filesystem, path = arrow.FileSystem.from_uri(quoted_uri)
        return _make_path(path, filesystem, quoted_uri)
    except (ValueError, NotImplementedError) as unknown:  # pyarrow's ArrowInvalid is a ValueError
        filesystem, path = _parse_fsspec_uri(uri, unknown)
        return _make_path(path, filesystem, uri)


def _parse_fsspec_uri(uri: str, unknown: Exception) -> tuple[FileSystem, str]:
    scheme = urlsplit(uri).scheme
    try:
        import fsspec

        filesystem, path = fsspec.url_to_fs(uri)
    except ImportError as error:
        raise ImportError(f"{uri!r} needs a package for {scheme}://: {error}") from error
    except ValueError:
        raise ValueError(
            f"{uri!r} has the scheme {scheme}://, which neither pyarrow nor fsspec supports "
            f"({unknown}). Use a local path or a supported URI, or pass a filesystem."
        ) from None
    return to_pyarrow(filesystem), path
