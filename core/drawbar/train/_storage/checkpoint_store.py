"""The checkpoints of a run, wherever they lie: written by ranks, committed, listed, deleted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from drawbar.train._errors import CheckpointError, DamagedRunError
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.contents import is_external
from drawbar.train._storage.external_checkpoints import INDEX_FILE, list_names
from drawbar.train._storage.filesystem import RemotePath, resolve_path
from drawbar.train._storage.manifest import (
    Manifest,
    assign_directory_names,
    check_file_sizes,
    make_already_committed_error,
    read_manifest,
)
from drawbar.train._storage.staging import AssignedFiles, StagedFiles


@dataclass(frozen=True, kw_only=True)
class CheckpointDraft:
    """A checkpoint that all ranks have brought their parts of, and that is to be committed.

    Attributes:
        manifest: What it is to consist of.
        parts: Where that lies.
        durable: Its bytes are on the disk when the commit returns.
        metadata: Becomes its metadata file, unless the user saved one.
        in_place: It lies where its name says already, and is committed with whatever is in there.
    """

    manifest: Manifest
    staged_files: Sequence[StagedFiles]
    durable: bool
    metadata: bytes | None = None
    is_in_place: bool = False


class UploadTarget(Protocol):
    """Where a rank puts its share of a checkpoint, seen from the rank's node."""

    def is_staged(self, path: Path) -> bool:
        """Whether a commit can take this directory as it lies."""
        ...

    def persist(self, files: AssignedFiles) -> StagedFiles:
        """Put a rank's share where a commit can take it.

        Raises:
            OSError: It cannot be written; the message has the path and the bytes.
        """
        ...


class CheckpointStore(UploadTarget, ABC):
    """All checkpoints of one run. A checkpoint exists if and only if its manifest does."""

    # -- one checkpoint

    @property
    @abstractmethod
    def root(self) -> Path | RemotePath:
        """The run's directory."""

    def path(self, name: str) -> Path | RemotePath:
        """Where the checkpoint of this name lies."""
        return resolve_path(name) if is_external(name) else self.root / name

    @abstractmethod
    def get_child_name(self, checkpoint: Checkpoint) -> str | None:
        """Give the name of a checkpoint that lies directly in the run; None for any other."""

    def get_in_place_name(self, checkpoint: Checkpoint) -> str | None:
        """Give the name that a checkpoint has by where it lies, which may be anywhere.

        None: what lies there is the run's own, or neither a path nor a URI leads there.
        """
        inside = self.get_child_name(checkpoint) or self._get_relative_path(checkpoint)
        if inside is not None:
            return None if inside.startswith(".") else inside
        return checkpoint.uri if is_external(checkpoint.uri) else None

    @abstractmethod
    def _get_relative_path(self, checkpoint: Checkpoint) -> str | None:
        """Give the path in the run that a checkpoint lies at; None if it lies elsewhere."""

    def get_checkpoint(self, name: str) -> Checkpoint:
        """Give the checkpoint of this name."""
        return Checkpoint.from_storage_path(self.path(name))

    def is_intact(self, name: str) -> bool:
        """Whether a checkpoint is committed and has every file with its size."""
        place = self.path(name)
        manifest = read_manifest(place)
        return manifest is not None and not _find_damage(place, manifest)

    def find_damage(self, manifest: Manifest) -> str:
        """Say which file a committed checkpoint lacks; "" if it has every one with its size."""
        return _find_damage(self.path(manifest.name), manifest)

    # -- changes

    @abstractmethod
    def commit(self, draft: CheckpointDraft) -> Manifest:
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
    def write_validation(self, manifest: Manifest, *, durable: bool) -> None:
        """Write what came of a checkpoint's validation beside its manifest.

        Raises:
            OSError: It cannot be written; the checkpoint is as it was.
        """

    # -- all checkpoints

    @abstractmethod
    def list_damaged(self) -> list[str]:
        """List the names of directories that were made as checkpoints and are not intact."""

    def clean_up(self) -> None:
        """Remove what earlier processes left among the checkpoints, uncommitted or half deleted."""

    @abstractmethod
    def _list_directories(self) -> list[str]:
        """List the names of folders directly in the run that may be checkpoints."""

    def names(self) -> list[str]:
        """List the names of folders that may be checkpoints. Nothing in them is read."""
        return [*self._list_directories(), *list_names(self.root)]

    def list_committed(self, names: Collection[str] | None = None) -> list[Manifest]:
        """List the committed checkpoints, oldest first. Their files are not checked.

        Args:
            names: Names of the checkpoints to list; None lists all.
        """
        read = {
            name: read_manifest(self.path(name))
            for name in (self.names() if names is None else names)
        }
        found: Mapping[str, Manifest] = {name: each for name, each in read.items() if each}
        return assign_directory_names(found)

    def list_readable(self) -> tuple[list[Manifest], dict[str, str]]:
        """List those of them that can be read, and say by name why others cannot."""
        names, found, unread = [*self._list_directories()], dict[str, Manifest](), dict[str, str]()
        try:
            names += list_names(self.root)
        except DamagedRunError as error:
            unread[INDEX_FILE] = str(error)
        for name in names:
            try:
                manifest = read_manifest(self.path(name))
            except (OSError, ImportError, ValueError) as error:  # of a place that is elsewhere too
                unread[name] = str(error)
            else:
                found |= {name: manifest} if manifest else {}
        return assign_directory_names(found), unread

    def list_intact(self) -> list[Manifest]:
        """List the committed checkpoints that have every file with its size, oldest first."""
        return [each for each in self.list_committed() if not self.find_damage(each)]

    def _check_not_committed(self, name: str) -> None:
        if self.is_intact(name):
            raise make_already_committed_error(self.path(name))


def _find_damage(place: Path | RemotePath, manifest: Manifest) -> str:
    try:
        check_file_sizes(place, manifest)
    except CheckpointError as error:
        return str(error)
    return ""


def make_name_conflict_error(place: Path | RemotePath) -> FileExistsError:
    """Say that something of the user's has the name of a checkpoint."""
    return FileExistsError(
        f"{place} is there and is no checkpoint that Drawbar made; move it away, or give the "
        "checkpoint another checkpoint_dir_name"
    )


def make_default_name(index: int) -> str:
    """Name the checkpoint of report `index`, if the user does not."""
    return f"checkpoint_{index:06d}"
