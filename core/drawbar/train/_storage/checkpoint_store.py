"""The checkpoints of a run, wherever they lie: written by ranks, committed, listed, deleted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from drawbar.train._errors import CheckpointError, DamagedRunError
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.contents import is_outside
from drawbar.train._storage.manifest import (
    Manifest,
    check_files,
    committed_already,
    read_manifest,
    under_their_names,
)
from drawbar.train._storage.places import PLACES, places_of
from drawbar.train._storage.remote_folder import Folder, locate
from drawbar.train._storage.staging import Part, Share


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A checkpoint that all ranks have brought their parts of, and that is to be committed.

    Attributes:
        manifest: What it is to consist of.
        parts: Where that lies.
        durable: Its bytes are on the disk when the commit returns.
        metadata: Becomes its metadata file, unless the user saved one.
        in_place: It lies where its name says already, and is committed with whatever is in there.
    """

    manifest: Manifest
    parts: Sequence[Part]
    durable: bool
    metadata: bytes | None = None
    in_place: bool = False


class ShareSink(Protocol):
    """Where a rank puts its share of a checkpoint, seen from the rank's node."""

    def is_staged(self, path: Path) -> bool:
        """Whether a commit can take this directory as it lies."""
        ...

    def persist(self, share: Share) -> Part:
        """Put a rank's share where a commit can take it.

        Raises:
            OSError: It cannot be written; the message has the path and the bytes.
        """
        ...


class CheckpointStore(ShareSink, ABC):
    """All checkpoints of one run. A checkpoint exists if and only if its manifest does."""

    # -- one checkpoint

    @property
    @abstractmethod
    def home(self) -> Path | Folder:
        """The run's directory."""

    def place(self, name: str) -> Path | Folder:
        """Where the checkpoint of this name lies."""
        return locate(name) if is_outside(name) else self.home / name

    @abstractmethod
    def name_of(self, checkpoint: Checkpoint) -> str | None:
        """Give the name of a checkpoint that lies directly in the run; None for any other."""

    def name_by_place(self, checkpoint: Checkpoint) -> str | None:
        """Give the name that a checkpoint has by where it lies, which may be anywhere.

        None: what lies there is the run's own, or neither a path nor a URI leads there.
        """
        inside = self.name_of(checkpoint) or self._path_inside(checkpoint)
        if inside is not None:
            return None if inside.startswith(".") else inside
        return checkpoint.uri if is_outside(checkpoint.uri) else None

    @abstractmethod
    def _path_inside(self, checkpoint: Checkpoint) -> str | None:
        """Give the path in the run that a checkpoint lies at; None if it lies elsewhere."""

    def checkpoint(self, name: str) -> Checkpoint:
        """Give the checkpoint of this name."""
        return Checkpoint.at(self.place(name))

    def is_intact(self, name: str) -> bool:
        """Whether a checkpoint is committed and has every file with its size."""
        place = self.place(name)
        manifest = read_manifest(place)
        return manifest is not None and not _damage(place, manifest)

    def damage(self, manifest: Manifest) -> str:
        """Say which file a committed checkpoint lacks; "" if it has every one with its size."""
        return _damage(self.place(manifest.name), manifest)

    # -- changes

    @abstractmethod
    def commit(self, draft: Draft) -> Manifest:
        """Make a checkpoint of what the ranks have persisted. Returns what it consists of.

        Raises:
            FileExistsError: A committed checkpoint has this name already, or a folder of the
                user's.
            CheckpointError: A file that a rank wrote is not there, or is cut off.
            OSError: The storage refused; nothing is committed and earlier checkpoints are
                untouched.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a checkpoint: gone in one step, its bytes follow. A missing one is no error.

        One that lies outside the run stays where it is, and is the run's no longer.
        """

    @abstractmethod
    def write_checksums(self, name: str) -> None:
        """See that a checkpoint has its second file, with hashes, which `verify()` reads."""

    @abstractmethod
    def keep_validation(self, manifest: Manifest, *, durable: bool) -> None:
        """Write what came of a checkpoint's validation beside its manifest.

        Raises:
            OSError: It cannot be written; the checkpoint is as it was.
        """

    # -- all checkpoints

    @abstractmethod
    def damaged(self) -> list[str]:
        """List the names of directories that were made as checkpoints and are not intact."""

    def sweep(self) -> None:
        """Remove what earlier processes left among the checkpoints, uncommitted or half deleted."""

    @abstractmethod
    def _folders(self) -> list[str]:
        """List the names of folders directly in the run that may be checkpoints."""

    def names(self) -> list[str]:
        """List the names of folders that may be checkpoints. Nothing in them is read."""
        return [*self._folders(), *places_of(self.home)]

    def committed(self, names: Collection[str] | None = None) -> list[Manifest]:
        """List the committed checkpoints, oldest first. Their files are not checked.

        Args:
            names: Names of the checkpoints to list; None lists all.
        """
        read = {
            name: read_manifest(self.place(name))
            for name in (self.names() if names is None else names)
        }
        found: Mapping[str, Manifest] = {name: each for name, each in read.items() if each}
        return under_their_names(found)

    def legible(self) -> tuple[list[Manifest], dict[str, str]]:
        """List those of them that can be read, and say by name why others cannot."""
        names, found, unread = [*self._folders()], dict[str, Manifest](), dict[str, str]()
        try:
            names += places_of(self.home)
        except DamagedRunError as error:
            unread[PLACES] = str(error)
        for name in names:
            try:
                manifest = read_manifest(self.place(name))
            except (OSError, ImportError, ValueError) as error:  # of a place that is elsewhere too
                unread[name] = str(error)
            else:
                found |= {name: manifest} if manifest else {}
        return under_their_names(found), unread

    def intact(self) -> list[Manifest]:
        """List the committed checkpoints that have every file with its size, oldest first."""
        return [each for each in self.committed() if not self.damage(each)]

    def _refuse_committed(self, name: str) -> None:
        if self.is_intact(name):
            raise committed_already(self.place(name))


def _damage(place: Path | Folder, manifest: Manifest) -> str:
    try:
        check_files(place, manifest)
    except CheckpointError as error:
        return str(error)
    return ""


def taken(place: Path | Folder) -> FileExistsError:
    """Say that something of the user's has the name of a checkpoint."""
    return FileExistsError(
        f"{place} is there and is no checkpoint that Drawbar made; move it away, or give the "
        "checkpoint another checkpoint_dir_name"
    )


def default_name(index: int) -> str:
    """Name the checkpoint of report `index`, if the user does not."""
    return f"checkpoint_{index:06d}"
