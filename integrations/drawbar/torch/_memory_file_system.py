"""Save shards with torch.distributed.checkpoint to files in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from drawbar.train.backend import MemoryFiles


def save_shards(state: dict[str, Any], files: MemoryFiles) -> None:
    """Save the parts of this rank. Call it on all ranks."""
    writer = FileSystemWriter(".", sync_files=False)
    writer.fs = _MemoryFileSystem(files)  # type: ignore[assignment]  # as FsspecWriter does
    save(state, storage_writer=writer)


class _MemoryFileSystem(FileSystemBase):
    """Files in memory, as the directory to which `torch.distributed.checkpoint` writes.

    Args:
        files: The files.
    """

    def __init__(self, files: MemoryFiles) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[Any]:
        """Create a file."""
        with self._files.open(str(path)) as file:
            yield file

    def concat_path(self, path: str | PathLike[str], suffix: str) -> Path:
        """Return the path of a file."""
        return Path(path, suffix)

    def init_path(self, path: str | PathLike[str]) -> Path:
        """Return a path."""
        return Path(path)

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        """Rename a file."""
        self._files.rename(str(path), str(new_path))

    def mkdir(self, path: str | PathLike[str]) -> None:
        """Do nothing: the files are created with their directories."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return True: there is one directory."""
        return True

    def exists(self, path: str | PathLike[str]) -> bool:
        """Return whether a file exists."""
        return self._files.exists(str(path))

    def rm_file(self, path: str | PathLike[str]) -> None:
        """Remove a file."""
        self._files.remove(str(path))
