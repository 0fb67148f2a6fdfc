"""Access a directory on a remote filesystem.

Operations that object stores do not support, such as renaming and appending, are not used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drawbar.train._storage.arrow_filesystems import (
    get_fsspec_filesystem,
    is_same_filesystem,
    iter_fsspec_infos,
)
from drawbar.train._storage.contents import FileEntry, check_relative_path, format_exact_size
from drawbar.train._storage.retries import retry_transient

if TYPE_CHECKING:
    from pyarrow import NativeFile
    from pyarrow.fs import FileInfo, FileSystem

_FLAT_FILESYSTEMS = ("s3", "gcs", "abfs")


@dataclass(frozen=True, eq=False)
class RemotePath:
    """A directory on a filesystem that is not mounted here. It may not exist.

    Attributes:
        fs_path: Path on the filesystem, without a scheme.
        filesystem: The `pyarrow.fs.FileSystem`.
        uri: URI that the user passed, for messages; "" if they passed a path.
    """

    fs_path: str
    filesystem: FileSystem
    uri: str = ""

    def __str__(self) -> str:
        return self.uri or self.fs_path

    def __truediv__(self, name: str) -> RemotePath:
        base, mark, query = self.uri.partition("?")
        uri = f"{base.rstrip('/')}/{name}{mark}{query}" if self.uri else ""
        return RemotePath(f"{self.fs_path.rstrip('/')}/{name}", self.filesystem, uri)

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.fs_path.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """Parent directory."""
        base, mark, query = self.uri.partition("?")
        uri = f"{base.rstrip('/').rpartition('/')[0]}{mark}{query}" if self.uri else ""
        return RemotePath(self.fs_path.rstrip("/").rpartition("/")[0], self.filesystem, uri)

    @property
    def local_path(self) -> Path | None:
        """Path on this node; None unless the filesystem is fsspec's wrapper of the local one."""
        wrapped = get_fsspec_filesystem(self.filesystem)
        protocols = getattr(wrapped, "protocol", ())
        return Path(self.fs_path) if "file" in protocols and "local" in protocols else None

    def is_same(self, other: RemotePath) -> bool:
        """Return True if both refer to the same directory."""
        return self.fs_path == other.fs_path and is_same_filesystem(
            self.filesystem, other.filesystem
        )

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
        info = retry_transient(
            lambda: self.filesystem.get_file_info([self.fs_path])[0], f"looking for {self}"
        )
        return bool(info.type.value)

    def get_size(self, name: str) -> int | None:
        """Return the size of a file; None if it does not exist."""
        path = f"{self.fs_path}/{name}"
        info = retry_transient(
            lambda: self.filesystem.get_file_info([path])[0], f"looking for {self / name}"
        )
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

    def read_or_none(self, name: str, size: int | None = None) -> bytes | None:
        """Read a file, or its first `size` bytes; return None if it does not exist."""
        try:
            return self.read(name, size)
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""

        def write() -> None:
            with self.open_output(name) as stream:
                stream.write(data)

        retry_transient(write, f"writing {format_exact_size(len(data))} to {self / name}")

    def open_output(self, name: str) -> NativeFile:
        """Open a file for writing. It exists when the stream is closed."""
        path = f"{self.fs_path}/{name}"
        # Object stores have no directories; create_dir would add an empty object of that name.
        if self.filesystem.type_name not in _FLAT_FILESYSTEMS:
            self.filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        return self.filesystem.open_output_stream(path, compression=None)

    # -- deleting

    def delete_file(self, name: str) -> None:
        """Delete a file. A missing file is not an error."""
        try:
            retry_transient(
                lambda: self.filesystem.delete_file(f"{self.fs_path}/{name}"),
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
            retry_transient(lambda: self.filesystem.delete_dir(self.fs_path), f"deleting {self}")
        except FileNotFoundError:
            return
