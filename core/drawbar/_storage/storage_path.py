"""`StoragePath`: a directory that is local or on a remote filesystem."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path, PosixPath
from stat import S_ISREG
from typing import TYPE_CHECKING, TypeAlias

from drawbar._base.packages import make_import_error
from drawbar._process.errors import CheckpointError
from drawbar._storage.contents import FileEntry, is_directory, list_files
from drawbar._storage.files import copy_files, read_regular_file, write_atomically
from drawbar._storage.remote_path import RemotePath

if TYPE_CHECKING:
    from types import ModuleType

    from pyarrow.fs import FileSystem


class LocalPath(PosixPath):
    """A directory on a filesystem of this node, including mounted ones. It may not exist.

    It is a path with those methods of `RemotePath` that runs and checkpoints need.
    """

    @property
    def fs_path(self) -> str:
        """Path on its filesystem, without a scheme."""
        return str(self)

    @property
    def filesystem(self) -> FileSystem:
        """The `pyarrow.fs.FileSystem`."""
        return make_local_filesystem()

    def read_or_none(self, name: str, start: int = 0) -> bytes | None:
        """Read a file from an offset; return None if it does not exist.

        Raises:
            OSError: The file cannot be read, or is not a regular file.
        """
        return read_file_or_none(self, name, start)

    def write_file(
        self, name: str, data: bytes, *, durable: bool = False, temp_directory: Path | None = None
    ) -> None:
        """Write a file atomically.

        Args:
            name: Name of the file.
            data: New content.
            durable: Whether the file must be on disk when this returns.
            temp_directory: Directory for the temporary file; see `write_atomically`.

        Raises:
            OSError: The file cannot be written; the message has the path and the size.
        """
        write_atomically(self / name, data, durable=durable, temp_directory=temp_directory)

    def delete_file(self, name: str) -> None:
        """Delete a file. A missing file is not an error."""
        (self / name).unlink(missing_ok=True)

    def list_directories(self) -> list[str]:
        """Return the sorted names of the direct subdirectories, without hidden ones.

        Raises:
            OSError: The directory does not exist or cannot be read.
        """
        with os.scandir(self) as entries:
            names = [entry.name for entry in entries if is_directory(entry)]
        return sorted(name for name in names if not name.startswith("."))

    def list_user_files(self) -> tuple[FileEntry, ...]:
        """Return every file below except Drawbar's, sorted by path."""
        return list_files(self)

    def get_sizes(self, files: Sequence[FileEntry]) -> dict[str, int | None]:
        """Return the current sizes of files by path; None for missing ones.

        Raises:
            CheckpointError: One is not a regular file.
        """
        return {file.path: _get_size(self / file.path) for file in files}

    def copy_user_files_to(self, target: Path) -> None:
        """Copy every file below except Drawbar's to an existing directory.

        Raises:
            ValueError: `target` is this directory.
        """
        if target.samefile(self):
            raise ValueError(
                f"to_directory(path={str(target)!r}) is the checkpoint itself. Pass another "
                "directory."
            )
        copy_files(self, target, list_files(self))


StoragePath: TypeAlias = LocalPath | RemotePath
"""Directory of a run or a checkpoint, or of their storage."""


def _get_size(path: Path) -> int | None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file.")
    return status.st_size


def read_file_or_none(path: Path, name: str, start: int = 0) -> bytes | None:
    """Read a local file from an offset; return None if it does not exist.

    Raises:
        OSError: The file cannot be read, or is not a regular file; see `read_regular_file`.
    """
    try:
        return read_regular_file(path / name, start)
    except (FileNotFoundError, NotADirectoryError):
        return None


def suggest_remote(path: StoragePath) -> str:
    """Return a sentence for an error about a path: for a missing local one, it may be remote."""
    if not isinstance(path, LocalPath) or path.exists():
        return ""
    return " If it is in remote storage, pass its URI, or its filesystem."


def make_local_filesystem() -> FileSystem:
    """Return pyarrow's filesystem of this node.

    Raises:
        ImportError: pyarrow is not installed.
    """
    return import_pyarrow_fs().LocalFileSystem()


def import_pyarrow_fs() -> ModuleType:
    """Import `pyarrow.fs`.

    Raises:
        ImportError: pyarrow is not installed. The message has the command that installs it.
    """
    try:
        return importlib.import_module("pyarrow.fs")
    except ImportError as error:
        raise ImportError(
            "Remote storage, and storage passed as a filesystem, needs pyarrow: "
            f"{make_import_error('pyarrow', extra='data')}"
        ) from error
