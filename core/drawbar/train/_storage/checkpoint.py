"""A checkpoint: a directory at a location. What is in it belongs to the user and their framework.

A committed checkpoint carries files of Drawbar's beside the user's: the manifest (`.drawbar.json`),
written as part of the commit and never again, the checksums, which follow a little later, and what
came of its validation, if there was one. A framework's own loader opens the directory as it is.
"""

from __future__ import annotations

import json
import os
import pickle
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import cloudpickle

from drawbar.train._errors import CheckpointError
from drawbar.train._storage.contents import MANIFEST_FILE, METADATA_FILE, list_files
from drawbar.train._storage.download_cache import keep_copy, use_cached_copy
from drawbar.train._storage.files import copy_files, write_atomically
from drawbar.train._storage.filesystem import (
    AnyFileSystem,
    RemotePath,
    is_same_filesystem,
    make_local_filesystem,
    resolve_path,
)
from drawbar.train._storage.manifest import (
    Manifest,
    check_file_sizes,
    compute_checksum,
    list_user_files,
    read_checksums,
    read_file_or_none,
    read_manifest,
)

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem
    from ray.data.preprocessor import Preprocessor

PREPROCESSOR_KEY = "preprocessor_pkl"
"""Where a preprocessor lies in a checkpoint's metadata, as in Ray Train's."""


def add_preprocessor(metadata: Mapping[str, object], preprocessor: object) -> dict[str, object]:
    """Give metadata that hold a preprocessor too."""
    return {**metadata, PREPROCESSOR_KEY: cloudpickle.dumps(preprocessor).hex()}


class Checkpoint:
    """A directory with whatever the training function saved.

    Args:
        path: The directory: a local or mounted path, or a URI such as `s3://bucket/folder`.
        filesystem: A `pyarrow.fs.FileSystem`, or one of fsspec, that `path` lies on. Default: the
            one that the URI names.

    Attributes:
        path: The directory's path on its filesystem, without a scheme.

    A checkpoint is equal to another one at the same place. `os.fspath(checkpoint)` gives its path
    if it is a local one, so that it can be handed to anything that opens a path.

    Raises:
        ImportError, ValueError, TypeError: `path` and `filesystem` name no storage that can be used
            here.
    """

    def __init__(
        self, path: str | os.PathLike[str], filesystem: AnyFileSystem | None = None
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"Checkpoint takes the path of a directory, found {path!r}")
        self._storage_path = resolve_path(path, filesystem)
        self.path = (
            self._storage_path.fs_path
            if isinstance(self._storage_path, RemotePath)
            else str(self._storage_path)
        )
        # Of this object, not of the place. It travels along, so that ranks which are given one
        # checkpoint make one copy of it.
        self._copy_key = uuid.uuid4().hex

    @property
    def filesystem(self) -> FileSystem:
        """The `pyarrow.fs.FileSystem` that `path` lies on."""
        return (
            make_local_filesystem()
            if isinstance(self._storage_path, Path)
            else self._storage_path.filesystem
        )

    @property
    def is_local(self) -> bool:
        """Whether `path` is one of this node, or of what is mounted here."""
        return isinstance(self._storage_path, Path)

    @property
    def uri(self) -> str:
        """The address of the directory, as it was given: a path, or a URI."""
        return str(self._storage_path)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """Refer to a local directory. Nothing is copied or checked until the checkpoint is used."""
        return cls(path)

    @classmethod
    def from_storage_path(cls, place: Path | RemotePath) -> Checkpoint:
        """Refer to a place that is known already."""
        if isinstance(place, Path):
            return cls(place)
        checkpoint = cls(place.fs_path, place.filesystem)
        checkpoint._storage_path = place
        return checkpoint

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Give a local path to read from. A local checkpoint is not copied; do not write to it.

        Any other is downloaded, once for all processes of a node that read it at the same time; the
        copy is removed when the last of them leaves the block.

        Raises:
            CheckpointError: The directory is not there.
        """
        self.check_exists()
        if isinstance(self._storage_path, Path):
            yield self.path
            return
        with use_cached_copy(self._storage_path) as path:
            yield str(path)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the files to a directory of your own and return its path.

        Args:
            path: Where to. Default: a temporary directory, one for all processes of a node that
                were given this very object, as by `get_checkpoint()` at the start of an attempt. It
                is yours to delete.

        Raises:
            CheckpointError: The checkpoint is not there.
            ValueError: `path` is the checkpoint itself.
        """
        self.check_exists()
        if path is None:
            return str(keep_copy(self._copy_key, self._copy_to))
        target = Path(path)
        target.mkdir(parents=True, exist_ok=True)
        self._copy_to(target)
        return str(target)

    def _copy_to(self, target: Path) -> None:
        if isinstance(self._storage_path, Path):
            if target.samefile(self._storage_path):
                raise ValueError(f"to_directory() was given the checkpoint's own path, {target}")
            copy_files(self._storage_path, target, list_files(self._storage_path))
        else:
            self._storage_path.download_files(target, list_user_files(self._storage_path))

    def get_metadata(self) -> dict[str, Any]:
        """Give the metadata set for this checkpoint, with the trainer's `metadata` in it."""
        data = read_file_or_none(self._storage_path, METADATA_FILE)
        return dict(json.loads(data)) if data is not None else {}

    def set_metadata(self, metadata: Mapping[str, object]) -> None:
        """Replace the metadata: any JSON-able mapping."""
        if not isinstance(metadata, Mapping):
            kind = type(metadata).__name__
            raise TypeError(f"the metadata must be a mapping, found {metadata!r} ({kind})")
        data = json.dumps(dict(metadata)).encode()
        if isinstance(self._storage_path, Path):
            committed = (self._storage_path / MANIFEST_FILE).exists()
            by_way_of = self._storage_path.parent if committed else None
            write_atomically(self._storage_path / METADATA_FILE, data, temp_directory=by_way_of)
        else:
            self._storage_path.write(METADATA_FILE, data)

    def update_metadata(self, metadata: Mapping[str, object]) -> None:
        """Add to the metadata; keys that are there already are replaced."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def get_preprocessor(self) -> Preprocessor | None:
        """Give the fitted preprocessor of Ray Data's that the run's datasets went through.

        It is unpickled: call this only for a checkpoint that you trust.

        Returns:
            That of `DataConfig.preprocessor` or `set_preprocessor`; None if there is none.
        """
        pickled = self.get_metadata().get(PREPROCESSOR_KEY)
        return None if pickled is None else pickle.loads(bytes.fromhex(pickled))

    def set_preprocessor(self, preprocessor: object) -> None:
        """Add a preprocessor to the metadata, as `DataConfig.preprocessor` does."""
        self.update_metadata(add_preprocessor({}, preprocessor))

    @property
    def manifest(self) -> Manifest | None:
        """What the commit wrote down: files, sizes, metrics. None if it is not committed."""
        return read_manifest(self._storage_path)

    def verify(self) -> None:
        """Check that the checkpoint is committed and unaltered: every file, its size, its checksum.

        Checksums are computed after the commit; where the process died before that, sizes alone are
        checked. A checkpoint that is not local is read in whole.

        Raises:
            CheckpointError: Something is missing or differs; the message names the file.
        """
        self.check_exists()
        manifest = self.manifest
        if manifest is None:
            written = read_file_or_none(self._storage_path, MANIFEST_FILE) is not None
            why = "its manifest cannot be read" if written else "it was never committed"
            raise CheckpointError(f"{self._storage_path} holds no manifest: {why}")
        check_file_sizes(self._storage_path, manifest)
        sums = read_checksums(self._storage_path)
        if sums is None:
            return
        with self.as_directory() as folder:
            for name, expected in sums.items():
                try:
                    found = compute_checksum(Path(folder) / name)
                except FileNotFoundError as gone:  # deleted in this very moment, as by retention
                    raise CheckpointError(f"{self._storage_path}/{name} is missing") from gone
                if found != expected:
                    raise CheckpointError(
                        f"{self._storage_path}/{name} was altered after the commit: its xxh3 is "
                        f"{found}, "
                        f"the commit has {expected}"
                    )

    def check_exists(self) -> None:
        """Check that the directory is there. Raises `CheckpointError` if it is not."""
        there = (
            self._storage_path.is_dir()
            if isinstance(self._storage_path, Path)
            else self._storage_path.exists()
        )
        if not there:
            raise CheckpointError(
                f"there is no checkpoint at {self._storage_path}: not a directory"
            )

    def __fspath__(self) -> str:
        if not self.is_local:
            raise TypeError(
                f"{self!r} is not on a local path; open it by "
                "`with checkpoint.as_directory() as path:`"
            )
        return self.path

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint) or self.path != other.path:
            return False
        if self.is_local or other.is_local:
            return self.is_local and other.is_local
        return is_same_filesystem(self.filesystem, other.filesystem)

    def __hash__(self) -> int:
        # Filesystems have no hash, and equal ones need not be one object.
        return hash(self.path)

    def __repr__(self) -> str:
        if self.is_local:
            return f"Checkpoint({self.path!r})"
        return f"Checkpoint({str(self._storage_path)!r}, filesystem={self.filesystem.type_name!r})"
