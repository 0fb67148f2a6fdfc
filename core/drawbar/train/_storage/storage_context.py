"""`StorageContext`: where a run lies, as a path and as a place on a pyarrow filesystem."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.contents import list_files
from drawbar.train._storage.filesystem import RemotePath, make_local_filesystem
from drawbar.train._storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


class StorageContext(os.PathLike[str]):
    """The run's directory. Files put there are yours; names with a leading "." are not.

    It is used as a path: `storage / "x"`, `open(storage / "x")`, and has the methods of
    `pathlib.Path`. If the run's storage is not a mounted filesystem, the path is that of the work
    folder on this node, and the other attributes say where the storage is.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._run_directory = directory
        self._path = directory.local_path

    @property
    def storage_filesystem(self) -> FileSystem:
        """The `pyarrow.fs.FileSystem` that the run lies on."""
        return self._run_directory.filesystem or make_local_filesystem()

    @property
    def storage_fs_path(self) -> str:
        """The storage path, on its filesystem."""
        return self._run_directory.storage_fs_path

    @property
    def experiment_dir_name(self) -> str:
        """Name of the run."""
        return self._run_directory.name

    @property
    def experiment_fs_path(self) -> str:
        """The run's directory, on its filesystem."""
        home = self._run_directory.root
        return home.fs_path if isinstance(home, RemotePath) else str(home)

    def build_checkpoint_path_from_name(self, checkpoint_name: str) -> str:
        """Give the path, on its filesystem, that a checkpoint of this name has."""
        return f"{self.experiment_fs_path}/{checkpoint_name}"

    def extract_checkpoint_dir_name_from_path(self, checkpoint_path: str) -> str:
        """Give the name of the checkpoint at a path: the rest of it, below the run's directory.

        Raises:
            ValueError: The path is not in the run's directory.
        """
        run = f"{self.experiment_fs_path}/"
        name = checkpoint_path.rstrip("/").removeprefix(run)
        if name == checkpoint_path.rstrip("/"):
            raise ValueError(f"{checkpoint_path!r} is not in {self.experiment_fs_path}")
        return name

    @staticmethod
    def make_default_checkpoint_dir_name() -> str:
        """Give a name with the date and the time; a report without one gets its number instead."""
        return f"checkpoint_{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"

    def persist_current_checkpoint(
        self, checkpoint: Checkpoint, checkpoint_dir_name: str
    ) -> Checkpoint:
        """Copy a checkpoint's files to where a checkpoint of this name lies, and give it there.

        For a `checkpoint_upload_fn`, which does something before or after.
        """
        place = self._run_directory.checkpoints.path(checkpoint_dir_name)
        if isinstance(place, RemotePath):
            with checkpoint.as_directory() as source:
                place.upload_files(Path(source), list_files(Path(source)))
        else:
            checkpoint.to_directory(place)
        return Checkpoint.from_storage_path(place)

    def __fspath__(self) -> str:
        return str(self._path)

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self._path / name

    def __eq__(self, other: object) -> bool:
        return self._path == (other._path if isinstance(other, StorageContext) else other)

    def __hash__(self) -> int:
        return hash(self._path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not set yet: this object is being unpickled
            raise AttributeError(name)
        return getattr(self._path, name)

    def __str__(self) -> str:
        return str(self._path)

    def __repr__(self) -> str:
        return f"StorageContext({self._run_directory.uri!r})"
