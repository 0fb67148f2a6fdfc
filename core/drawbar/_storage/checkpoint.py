"""`Checkpoint`: a directory of saved files on a local or remote filesystem.

A committed checkpoint also has files that Drawbar writes: the manifest (`.drawbar.json`), which is
part of the commit and never changes, the checksums, which follow shortly after the commit, and the
result of the validation, if there was one. The loaders of frameworks can open the directory as is.
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

from drawbar._process.errors import CheckpointError
from drawbar._storage.contents import MANIFEST_FILE, METADATA_FILE
from drawbar._storage.download_cache import keep_copy, use_cached_copy
from drawbar._storage.filesystem import AnyFileSystem, resolve_path
from drawbar._storage.local_copies import open_copy
from drawbar._storage.manifest import (
    Manifest,
    check_file_sizes,
    compute_checksum,
    read_checksums,
    read_manifest,
)
from drawbar._storage.remote_path import RemotePath, is_same_filesystem
from drawbar._storage.storage_path import LocalPath, StoragePath, suggest_remote

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem
    from ray.data.preprocessor import Preprocessor

PREPROCESSOR_KEY = "preprocessor_pkl"
"""Key of the preprocessor in the metadata of a checkpoint, the same as in Ray Train."""


def add_preprocessor(metadata: Mapping[str, object], preprocessor: object) -> dict[str, object]:
    """Return a copy of the metadata with the pickled preprocessor added."""
    return {**metadata, PREPROCESSOR_KEY: cloudpickle.dumps(preprocessor).hex()}


class Checkpoint:
    """A directory of files that the training function saved.

    Checkpoints are equal if they refer to the same directory. `os.fspath(checkpoint)` returns the
    path of a local checkpoint, so it can be passed to any function that opens a path.

    Args:
        path: Local or mounted directory, or a URI such as `s3://bucket/directory`.
        filesystem: `pyarrow.fs.FileSystem` or fsspec filesystem that `path` refers to. Default:
            the filesystem of the URI, or the local one.

    Attributes:
        path: Path of the directory on its filesystem, without a scheme.

    Raises:
        ImportError: The package for the filesystem is not installed.
        ValueError: `path` is empty, or has an unknown scheme.
        TypeError: `path` is not a path, or `filesystem` is not a filesystem.

    Example:
        Load the state from the latest checkpoint in a training function:

            checkpoint = train.get_checkpoint()
            if checkpoint is not None:
                with checkpoint.as_directory() as path:
                    model.load_state_dict(torch.load(os.path.join(path, "model.pt")))
    """

    def __init__(
        self, path: str | os.PathLike[str], filesystem: AnyFileSystem | None = None
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"Checkpoint(path={path!r}) must be the path or URI of a directory.")
        self._storage_path = resolve_path(path, filesystem)
        self.path = self._storage_path.fs_path
        # Belongs to this object, not to the directory. It is pickled with the object, so that all
        # ranks that receive the same checkpoint share one copy.
        self._copy_key = uuid.uuid4().hex

    @property
    def filesystem(self) -> FileSystem:
        """`pyarrow.fs.FileSystem` that `path` refers to."""
        return self._storage_path.filesystem

    @property
    def is_local(self) -> bool:
        """True if `path` is on a filesystem of this node, including mounted ones."""
        return isinstance(self._storage_path, LocalPath)

    @property
    def uri(self) -> str:
        """URI of a remote directory that was passed without a `filesystem`; otherwise `path`."""
        return str(self._storage_path)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """Return a checkpoint that refers to a local directory.

        Files are neither copied nor checked until the checkpoint is used.

        Args:
            path: Local or mounted directory.

        Returns:
            The checkpoint.

        Example:
            Report a directory that the training function has written:

                train.report({"loss": loss}, checkpoint=Checkpoint.from_directory(path))
        """
        return cls(path)

    @classmethod
    def from_storage_path(cls, storage_path: StoragePath) -> Checkpoint:
        """Return a checkpoint that refers to an already resolved path."""
        if isinstance(storage_path, LocalPath):
            return cls(storage_path)
        checkpoint = cls(storage_path.fs_path, storage_path.filesystem)
        checkpoint._storage_path = storage_path
        return checkpoint

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Provide a local path to read the checkpoint from, as a context manager.

        A local checkpoint is not copied, so do not write to it. A remote one is downloaded once
        per node for all processes that read it at the same time. The last process that leaves the
        block deletes the copy. After a restart, a checkpoint of `save_async` is read from memory if
        this node still has it.

        Yields:
            Local path of the directory.

        Raises:
            CheckpointError: The directory does not exist.

        Example:
            Read a file of the checkpoint:

                with checkpoint.as_directory() as path:
                    state = torch.load(os.path.join(path, "state.pt"))
        """
        with open_copy(self._storage_path) as copy:
            if copy is not None:
                yield str(copy)
                return
        self.check_exists()
        if isinstance(self._storage_path, RemotePath):
            with use_cached_copy(self._storage_path) as path:
                yield str(path)
        else:
            yield self.path

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the files to a local directory.

        Args:
            path: Target directory; it is created if it does not exist. Default: a temporary
                directory, which the caller must delete. Workers on the same node share it if they
                call this method of the checkpoint that `get_checkpoint()` returns at the start of
                an attempt.

        Returns:
            Path of the directory with the copy.

        Raises:
            CheckpointError: The checkpoint does not exist.
            ValueError: `path` is the directory of the checkpoint itself.

        Example:
            Export the best checkpoint of a run:

                best = result.get_best_checkpoint("loss", mode="min")
                best.to_directory("exported_model")
        """
        self.check_exists()
        if path is None:
            return str(keep_copy(self._copy_key, self._storage_path.copy_user_files_to))
        target = Path(path)
        target.mkdir(parents=True, exist_ok=True)
        self._storage_path.copy_user_files_to(target)
        return str(target)

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata of the checkpoint, including the trainer's `metadata`.

        Returns:
            The metadata; an empty dict if there is none.

        Example:
            Print where the checkpoint was deployed:

                print(checkpoint.get_metadata().get("deployed"))
        """
        data = self._storage_path.read_or_none(METADATA_FILE)
        return dict(json.loads(data)) if data is not None else {}

    def set_metadata(self, metadata: Mapping[str, object]) -> None:
        """Replace the metadata of the checkpoint.

        Args:
            metadata: Mapping that can be stored as JSON.

        Raises:
            TypeError: `metadata` is not a mapping, or has a value that JSON cannot store.
            OSError: The storage cannot be written.

        Example:
            Record where the checkpoint was deployed:

                checkpoint.set_metadata({"deployed": "staging"})
        """
        if not isinstance(metadata, Mapping):
            type_name = type(metadata).__name__
            raise TypeError(
                f"Checkpoint metadata must be a mapping, not {metadata!r} ({type_name})."
            )
        data = json.dumps(dict(metadata)).encode()
        temp_directory = None
        if (
            isinstance(self._storage_path, LocalPath)
            and (self._storage_path / MANIFEST_FILE).exists()
        ):
            temp_directory = self._storage_path.parent
        self._storage_path.write_file(METADATA_FILE, data, temp_directory=temp_directory)

    def update_metadata(self, metadata: Mapping[str, object]) -> None:
        """Add keys to the metadata. Existing keys are replaced.

        Args:
            metadata: Mapping that can be stored as JSON.

        Raises:
            TypeError: `metadata` has a value that JSON cannot store.
            OSError: The storage cannot be written.

        Example:
            Add a key and keep the others:

                checkpoint.update_metadata({"reviewed": True})
        """
        self.set_metadata({**self.get_metadata(), **metadata})

    def get_preprocessor(self) -> Preprocessor | None:
        """Return the fitted Ray Data preprocessor of the run's datasets.

        The preprocessor is unpickled, so call this only for checkpoints that you trust.

        Returns:
            The preprocessor from `DataConfig.preprocessor` or `set_preprocessor()`, or None.

        Example:
            Prepare a batch for inference as in training:

                preprocessor = result.checkpoint.get_preprocessor()
                batch = preprocessor.transform_batch(batch)
        """
        pickled = self.get_metadata().get(PREPROCESSOR_KEY)
        return None if pickled is None else pickle.loads(bytes.fromhex(pickled))

    def set_preprocessor(self, preprocessor: object) -> None:
        """Store a preprocessor in the metadata, as `DataConfig.preprocessor` does.

        Args:
            preprocessor: Fitted preprocessor; it is pickled with cloudpickle.

        Raises:
            OSError: The storage cannot be written.

        Example:
            Store the preprocessor of a dataset that was prepared before training:

                checkpoint.set_preprocessor(preprocessor)
        """
        self.update_metadata(add_preprocessor({}, preprocessor))

    @property
    def manifest(self) -> Manifest | None:
        """Manifest with the files, sizes, and metrics; None if there is no readable manifest."""
        return read_manifest(self._storage_path)

    def verify(self) -> None:
        """Check that the checkpoint is committed and that no file is missing or changed.

        Compares the size and the checksum of each file with the commit. Checksums are computed
        after the commit; if the process died before that, only the sizes are compared. A remote
        checkpoint is downloaded completely.

        Raises:
            CheckpointError: A file is missing or differs from the commit, or the checkpoint is not
                committed. The message names the file.

        Example:
            Check a checkpoint before you export it:

                result.checkpoint.verify()
        """
        self.check_exists()
        manifest = self.manifest
        if manifest is None:
            written = self._storage_path.read_or_none(MANIFEST_FILE) is not None
            reason = "The manifest is damaged." if written else "It was never committed."
            raise CheckpointError(
                f"{self._storage_path} has no readable manifest ({MANIFEST_FILE}). {reason}"
            )
        check_file_sizes(self._storage_path, manifest)
        sums = read_checksums(self._storage_path)
        if sums is None:
            return
        with self.as_directory() as directory:
            for name, expected in sums.items():
                try:
                    checksum = compute_checksum(Path(directory) / name)
                except FileNotFoundError as error:  # deleted meanwhile, for example by retention
                    raise CheckpointError(f"{self._storage_path}/{name} is missing.") from error
                if checksum != expected:
                    raise CheckpointError(
                        f"{self._storage_path}/{name} was changed after the commit: its xxh3 "
                        f"checksum is {checksum}, but was {expected} at the commit."
                    )

    def check_exists(self) -> None:
        """Check that the directory exists.

        Raises:
            CheckpointError: The directory does not exist.
        """
        path = self._storage_path
        if not (path.is_dir() if isinstance(path, LocalPath) else path.exists()):
            raise CheckpointError(
                f"Checkpoint {self._storage_path} does not exist."
                f"{suggest_remote(self._storage_path)}"
            )

    def __fspath__(self) -> str:
        if not self.is_local:
            raise TypeError(
                f"{self!r} has no local path. Open it with "
                "`with checkpoint.as_directory() as path:`."
            )
        return self.path

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint) or self.path != other.path:
            return False
        if self.is_local or other.is_local:
            return self.is_local and other.is_local
        return is_same_filesystem(self.filesystem, other.filesystem)

    def __hash__(self) -> int:
        # Filesystems are not hashable, and equal ones can be different objects.
        return hash(self.path)

    def __repr__(self) -> str:
        if self.is_local:
            return f"Checkpoint({self.path!r})"
        return f"Checkpoint({str(self._storage_path)!r}, filesystem={self.filesystem.type_name!r})"
