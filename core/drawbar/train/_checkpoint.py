"""A checkpoint: a directory at a location. What is in it belongs to the user and their framework.

A committed checkpoint carries two files of Drawbar's beside the user's: the manifest
(`.drawbar.json`), written as part of the commit, and the checksums, which follow a little later. A
framework's own loader opens the directory as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from drawbar.train import _files
from drawbar.train._errors import CheckpointError
from drawbar.train._messages import FileEntry
from drawbar.train._metrics import from_json, to_json


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint consists of. It is the commit: without it there is no checkpoint."""

    name: str
    index: int
    attempt: int
    world_size: int
    time: float
    files: tuple[FileEntry, ...]
    metrics: dict[str, Any]
    positions: dict[str, Any] = {}
    run_id: str = ""
    version: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    def encode(self) -> bytes:
        """Give the manifest as JSON."""
        plain = msgspec.structs.replace(self, metrics=to_json(self.metrics))
        return msgspec.json.format(msgspec.json.encode(plain), indent=1)

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Read a manifest. Raises `msgspec.MsgspecError` if it is damaged."""
        manifest = msgspec.json.decode(data, type=Manifest)
        return msgspec.structs.replace(manifest, metrics=from_json(manifest.metrics))


class Checkpoint:
    """A directory with whatever the training function saved.

    Args:
        path: The directory: a local or mounted path.

    A checkpoint is equal to another one at the same place. `os.fspath(checkpoint)` gives its path,
    so that it can be handed to anything that opens a path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"Checkpoint takes the path of a directory, found {path!r}")
        self.path = os.path.abspath(os.path.expanduser(os.fspath(path)))

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Refer to a local directory. Nothing is copied or checked until the checkpoint is used."""
        return cls(path)

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Give a local path to read from. A local checkpoint is not copied; do not write to it.

        Raises:
            CheckpointError: The directory is not there.
        """
        self._require()
        yield self.path

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the files to a directory of your own and return its path.

        Args:
            path: Where to. Default: a new temporary directory, which is yours to delete.

        Raises:
            CheckpointError: The checkpoint is not there.
        """
        self._require()
        target = Path(path) if path is not None else Path(tempfile.mkdtemp(prefix="checkpoint_"))
        target.mkdir(parents=True, exist_ok=True)
        _files.copy_files(Path(self.path), target, _files.list_files(Path(self.path)))
        return str(target)

    def get_metadata(self) -> dict[str, Any]:
        """Give the metadata set for this checkpoint, with the trainer's `metadata` in it."""
        try:
            found: dict[str, Any] = json.loads((Path(self.path) / _files.METADATA).read_bytes())
        except FileNotFoundError:
            return {}
        return found

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata: any JSON-able mapping."""
        data = json.dumps(dict(metadata)).encode()
        _files.write_atomically(Path(self.path) / _files.METADATA, data)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to the metadata; keys that are there already are replaced."""
        self.set_metadata({**self.get_metadata(), **metadata})

    @property
    def manifest(self) -> Manifest | None:
        """What the commit wrote down: files, sizes, metrics. None if it is not committed."""
        return read_manifest(Path(self.path))

    def verify(self) -> None:
        """Check that the checkpoint is committed and unaltered: every file, its size, its checksum.

        Checksums are computed after the commit; where the process died before that, sizes alone are
        checked.

        Raises:
            CheckpointError: Something is missing or differs; the message names the file.
        """
        self._require()
        manifest = self.manifest
        if manifest is None:
            raise CheckpointError(f"{self.path} holds no manifest: it was never committed")
        check_files(Path(self.path), manifest)
        sums = Path(self.path) / _files.CHECKSUMS
        if not sums.exists():
            return
        for name, expected in json.loads(sums.read_bytes()).items():
            found = _files.checksum(Path(self.path) / name)
            if found != expected:
                raise CheckpointError(
                    f"{self.path}/{name} was altered after the commit: its xxh3 is {found}, "
                    f"the commit has {expected}"
                )

    def _require(self) -> None:
        if not os.path.isdir(self.path):
            raise CheckpointError(f"there is no checkpoint at {self.path}: not a directory")

    def __fspath__(self) -> str:
        return self.path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r})"


def read_manifest(directory: Path) -> Manifest | None:
    """Read the manifest of a checkpoint directory; None if there is none that can be read."""
    try:
        return Manifest.decode((directory / _files.MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None


def check_files(directory: Path, manifest: Manifest) -> None:
    """Check that each file of the manifest is there with its size.

    Raises:
        CheckpointError: A file is missing or has another size.
    """
    for file in manifest.files:
        try:
            size = os.stat(directory / file.path).st_size
        except FileNotFoundError:
            raise CheckpointError(f"{directory}/{file.path} is missing") from None
        if size != file.size:
            raise CheckpointError(
                f"{directory}/{file.path} has {size} bytes, the commit has {file.size}"
            )


def remove_tree(path: Path) -> None:
    """Delete a directory and do not mind if some of it is gone already."""
    shutil.rmtree(path, ignore_errors=True)
