"""Access a directory on a remote filesystem: list, read, write, and transfer its files.

Operations that object stores do not support, such as renaming and appending, are not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from drawbar._process.threads import DaemonThreadPool
from drawbar._storage import fault_points
from drawbar._storage.contents import (
    FileEntry,
    check_relative_path,
    format_exact_size,
    is_reserved,
    is_temporary,
)
from drawbar._storage.fsspec_files import (
    delete_directory,
    delete_file,
    get_fsspec_filesystem,
    iter_fsspec_infos,
)
from drawbar._storage.remote_output import FLAT_FILESYSTEMS, can_rename, open_output
from drawbar._storage.retries import retry_transient
from drawbar._storage.uris import get_parent_uri, join_uri

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from pyarrow import NativeFile
    from pyarrow.fs import FileInfo, FileSystem

T = TypeVar("T")

_ENDPOINT_SETTINGS = (  # pyarrow's and fsspec's settings that identify the server of a filesystem
    "account_name",
    "blob_storage_authority",
    "endpoint_override",
    "endpoint_url",
    "host",
    "port",
)
_TRANSFER_THREADS = 8
_TRANSFER_CHUNK_BYTES = 16 * 1024 * 1024
_SINGLE_REQUEST_BYTES = 4 * 1024 * 1024  # that object stores of pyarrow write in one request


@dataclass(frozen=True, eq=False)
class RemotePath:
    """A directory on a filesystem that is not mounted here. It may not exist.

    Attributes:
        fs_path: Path on the filesystem, without a scheme.
        filesystem: The `pyarrow.fs.FileSystem`.
        uri: URI, if the user passed one; "" if they passed a path. See `uris`.
    """

    fs_path: str
    filesystem: FileSystem
    uri: str = ""

    def __str__(self) -> str:
        return self.uri or self.fs_path

    def __truediv__(self, name: str) -> RemotePath:
        uri = join_uri(self.uri, name, is_quoted=_is_quoted(self.filesystem)) if self.uri else ""
        return RemotePath(f"{self.fs_path.rstrip('/')}/{name}", self.filesystem, uri)

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.fs_path.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """Parent directory."""
        uri = get_parent_uri(self.uri, is_quoted=_is_quoted(self.filesystem)) if self.uri else ""
        return RemotePath(self.fs_path.rstrip("/").rpartition("/")[0], self.filesystem, uri)

    # -- listing

    def list_files(self) -> tuple[FileEntry, ...]:
        """Return every file below, sorted by path; none if the directory does not exist.

        Raises:
            CheckpointError: The storage lists a file outside this directory.
        """
        files = [
            FileEntry(self._make_relative(info.path), info.size)
            for info in self._list_infos(recursive=True)
            if info.is_file
        ]
        return tuple(sorted(files, key=lambda file: file.path))

    def list_user_files(self) -> tuple[FileEntry, ...]:
        """Return every file below except Drawbar's, sorted by path."""
        return tuple(file for file in self.list_files() if not is_reserved(file.path))

    def get_sizes(self, files: Sequence[FileEntry]) -> dict[str, int | None]:
        """Return the sizes of files by path; missing ones are missing or None."""
        return {file.path: file.size for file in self.list_files()}

    def list_directories(self) -> list[str]:
        """Return the names of the direct subdirectories.

        Raises:
            CheckpointError: The storage lists a directory outside this one.
        """
        directories = (info for info in self._list_infos(recursive=False) if not info.is_file)
        return sorted(check_relative_path(self._make_relative(info.path)) for info in directories)

    def _list_infos(self, *, recursive: bool) -> Iterable[FileInfo]:
        from pyarrow.fs import FileSelector

        wrapped = get_fsspec_filesystem(self.filesystem)
        selector = FileSelector(self.fs_path, recursive=recursive, allow_not_found=True)

        def list_infos() -> list[FileInfo]:
            if wrapped is not None:
                return list(iter_fsspec_infos(wrapped, self.fs_path, is_recursive=recursive))
            infos: list[FileInfo] = self.filesystem.get_file_info(selector)
            return infos

        return retry_transient(list_infos, f"listing {self}")

    def _make_relative(self, path: str) -> str:
        return path.strip("/").removeprefix(self.fs_path.strip("/")).strip("/")

    def exists(self) -> bool:
        """Return True if a file or directory has this path."""
        return bool(_get_info(self).type.value)

    def get_size(self, name: str) -> int | None:
        """Return the size of a file; None if it does not exist."""
        info = _get_info(self / name)
        return info.size if info.is_file else None

    # -- single files

    def read(self, name: str, size: int | None = None) -> bytes:
        """Read a file, or its first `size` bytes.

        Raises:
            FileNotFoundError: The file does not exist.
        """

        def read() -> bytes:
            with self.open_input(name) as stream:
                data: bytes = stream.read(size)
            return data

        return retry_transient(read, f"reading {self / name}")

    def open_input(self, name: str) -> NativeFile:
        """Open a file for reading.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        path = f"{self.fs_path}/{name}"
        try:
            # By default, pyarrow decompresses a file with a name such as `data.gz`.
            return self.filesystem.open_input_stream(path, compression=None)
        except FileNotFoundError:
            # pyarrow's wrapper of fsspec raises this also if the store fails.
            is_wrapped = get_fsspec_filesystem(self.filesystem) is not None
            if is_wrapped and self.filesystem.get_file_info([path])[0].type.value:
                raise ConnectionError(f"{self / name} exists, but could not be opened") from None
            raise

    def read_or_none(self, name: str, start: int = 0) -> bytes | None:
        """Read a file from an offset; return None if it does not exist."""
        try:
            return self.read(name)[start:]
        except FileNotFoundError:
            return None

    def write_file(
        self, name: str, data: bytes, *, durable: bool = False, temp_directory: Path | None = None
    ) -> None:
        """Write a file. After an error, the older file remains."""
        is_large = len(data) > _SINGLE_REQUEST_BYTES

        def write() -> None:
            with self.open_output(name, keeps_older=is_large) as stream:
                stream.write(data)

        retry_transient(write, f"writing {format_exact_size(len(data))} to {self / name}")

    @contextlib.contextmanager
    def open_output(self, name: str, *, keeps_older: bool = False) -> Iterator[IO[bytes]]:
        """Open a file for writing that is stored only if the block ends without an exception.

        With `keeps_older`, object stores of pyarrow keep an older file after an exception.
        """
        path = f"{self.fs_path}/{name}"
        # Object stores have no directories; create_dir would add an empty object of that name.
        if self.filesystem.type_name not in FLAT_FILESYSTEMS:
            self.filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        with open_output(self.filesystem, path, keeps_older=keeps_older) as stream:
            yield stream

    def copy_user_files_to(self, target: Path) -> None:
        """Copy every file below except Drawbar's to a local directory."""
        download_files(self, target, self.list_user_files())

    # -- deleting

    def delete_file(self, name: str) -> None:
        """Delete a file. A missing file is not an error."""
        try:
            retry_transient(
                lambda: delete_file(self.filesystem, f"{self.fs_path}/{name}"),
                f"deleting {self / name}",
            )
        except FileNotFoundError:
            return
        except OSError:
            # Some stores refuse to delete a missing file.
            if any(file.path == name for file in self.list_files()):
                raise

    def delete_tree(self) -> None:
        """Delete everything in this directory. A missing directory is not an error."""
        try:
            retry_transient(
                lambda: delete_directory(self.filesystem, self.fs_path), f"deleting {self}"
            )
        except FileNotFoundError:
            return


def _get_info(path: RemotePath) -> FileInfo:
    return retry_transient(
        lambda: path.filesystem.get_file_info([path.fs_path])[0], f"looking for {path}"
    )


def find_mounted_path(path: RemotePath) -> Path | None:
    """Return a path on this node; None unless fsspec wraps the local filesystem."""
    wrapped = get_fsspec_filesystem(path.filesystem)
    protocols = getattr(wrapped, "protocol", ())
    return Path(path.fs_path) if "file" in protocols and "local" in protocols else None


def delete_temporary_files(directory: RemotePath) -> None:
    """Delete the temporary files below a directory that a killed process has left."""
    filesystem = directory.filesystem
    if can_rename(filesystem) or filesystem.type_name in FLAT_FILESYSTEMS:  # else there are none
        for file in directory.list_files():
            if is_temporary(file.path):
                directory.delete_file(file.path)


def _is_quoted(filesystem: FileSystem) -> bool:
    """Return True if the URIs of a filesystem are percent-encoded; see `uris`."""
    return get_fsspec_filesystem(filesystem) is None


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


def upload_files(source: Path, target: RemotePath, files: Sequence[FileEntry]) -> dict[str, str]:
    """Copy files of a local directory into a remote one.

    Returns:
        The xxh3 (64 bit) of each written file as 16 hex digits, by path.
    """
    fault_points.maybe_stop_at("persist.start")
    checksums = _transfer_parallel(
        files, lambda file: upload_file(source / file.path, target, file)
    )
    return {file.path: checksum for file, checksum in zip(files, checksums, strict=True)}


def upload_file(source: Path, target: RemotePath, file: FileEntry) -> str:
    """Copy a local file to `file` in a remote directory, and return its xxh3."""
    import xxhash

    def upload() -> str:
        # A new digest for each try: a failed try has hashed only a part of the file.
        digest = xxhash.xxh3_64()
        with open(source, "rb") as reader:
            chunk = reader.read(_TRANSFER_CHUNK_BYTES)  # first: an error leaves the older object
            with target.open_output(file.path) as writer:
                while chunk:
                    writer.write(chunk)
                    digest.update(chunk)
                    chunk = reader.read(_TRANSFER_CHUNK_BYTES)
        return str(digest.hexdigest())

    return retry_transient(
        upload, f"writing {format_exact_size(file.size)} to {target / file.path}"
    )


def download_files(source: RemotePath, target: Path, files: Sequence[FileEntry]) -> None:
    """Copy files of a remote directory into a local one."""
    _transfer_parallel(files, lambda file: _download_file(source, target / file.path, file))


def _download_file(source: RemotePath, target: Path, file: FileEntry) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)

    def download() -> None:
        with source.open_input(file.path) as reader, open(target, "wb") as writer:
            while chunk := reader.read(_TRANSFER_CHUNK_BYTES):
                writer.write(chunk)

    retry_transient(download, f"reading {format_exact_size(file.size)} from {source / file.path}")


def _transfer_parallel(files: Sequence[FileEntry], action: Callable[[FileEntry], T]) -> list[T]:
    results: list[T] = []
    with DaemonThreadPool(_TRANSFER_THREADS, "drawbar-transfer") as pool:
        for result in pool.map(action, files):
            if not results:
                fault_points.maybe_stop_at("persist.half")
            results.append(result)
    return results
