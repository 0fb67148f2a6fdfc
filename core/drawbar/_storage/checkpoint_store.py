"""Interface to the checkpoints of a run: commit, list, verify, quarantine, and delete."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from drawbar._process.errors import CheckpointError, DamagedRunError
from drawbar._storage import fault_points
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.contents import (
    CHECKSUMS_FILE,
    MANIFEST_FILE,
    METADATA_FILE,
    has_reserved_files,
    is_external,
)
from drawbar._storage.external_checkpoints import INDEX_FILE, add_name, list_names
from drawbar._storage.files import fsync_path
from drawbar._storage.filesystem import resolve_path
from drawbar._storage.manifest import (
    Manifest,
    assign_directory_names,
    check_file_sizes,
    make_already_committed_error,
    read_manifest,
    write_manifest,
)
from drawbar._storage.staging import AssignedFiles, StagedFiles
from drawbar._storage.storage_path import LocalPath, StoragePath
from drawbar._storage.unfinished_uploads import (
    add_upload,
    list_uploads,
    remove_upload,
    remove_uploads_directory,
)


@dataclass(frozen=True, kw_only=True)
class CheckpointDraft:
    """A checkpoint whose files have arrived from all ranks and that can be committed.

    Attributes:
        manifest: Manifest of the checkpoint.
        staged_files: Staged files of each rank.
        durable: Whether all bytes must be on disk when the commit returns.
        metadata: Content of the metadata file, unless the user saved one.
        is_in_place: Whether the files are already in the final directory. The commit then includes
            every file in it.
        upload_name: Name that `begin_upload` has recorded; "" if there was no upload function.
    """

    manifest: Manifest
    staged_files: Sequence[StagedFiles]
    durable: bool
    metadata: bytes | None = None
    is_in_place: bool = False
    upload_name: str = ""


class UploadTarget(Protocol):
    """Storage to which a rank copies or moves its assigned files.

    The methods run on the rank's node.
    """

    def is_staged(self, path: Path) -> bool:
        """Return True if a commit can use this directory without copying it."""
        ...

    def persist(self, files: AssignedFiles) -> StagedFiles:
        """Copy or move the assigned files of a rank to where a commit can use them.

        Raises:
            OSError: The files cannot be written; the message has the path and the size.
        """
        ...


class CheckpointStore(UploadTarget, ABC):
    """All checkpoints of one run. A checkpoint exists if and only if its manifest does."""

    # -- one checkpoint

    @property
    @abstractmethod
    def root(self) -> StoragePath:
        """Directory of the run."""

    def path(self, name: str) -> StoragePath:
        """Return the path of a checkpoint."""
        return resolve_path(name) if is_external(name) else self.root / name

    @abstractmethod
    def get_child_name(self, checkpoint: Checkpoint) -> str | None:
        """Return the name of a checkpoint that is a direct child of the run; else None."""

    def get_in_place_name(self, checkpoint: Checkpoint) -> str | None:
        """Return the name under which a checkpoint would be committed in place, or None.

        None means that the directory is Drawbar's own, or that no path or URI refers to it.
        """
        inside = self.get_child_name(checkpoint) or self._get_relative_path(checkpoint)
        if inside is not None:
            return None if inside.startswith(".") else inside
        return checkpoint.uri if is_external(checkpoint.uri) else None

    @abstractmethod
    def _get_relative_path(self, checkpoint: Checkpoint) -> str | None:
        """Return the path of a checkpoint relative to the run; None if it is external."""

    def get_checkpoint(self, name: str) -> Checkpoint:
        """Return the checkpoint with this name."""
        return Checkpoint.from_storage_path(self.path(name))

    def is_intact(self, name: str) -> bool:
        """Return True if a checkpoint is committed and has every file with its size."""
        path = self.path(name)
        manifest = read_manifest(path)
        return manifest is not None and not _find_damage(path, manifest)

    def find_damage(self, manifest: Manifest) -> str:
        """Return which file of a committed checkpoint is missing or truncated; "" if none is."""
        return _find_damage(self.path(manifest.name), manifest)

    # -- changes

    def reserve(self, name: str) -> None:
        """Reserve the directory of a checkpoint before ranks write to it. Must be called once.

        Raises:
            FileExistsError: A directory of the user has this name.
            OSError: The storage failed.
        """

    def begin_upload(self, name: str) -> None:
        """Record that upload functions are about to write a checkpoint to its directory.

        Until the commit, `delete_uncommitted_uploads` deletes the directory, unless it existed
        before. Files in other directories are never deleted.

        Raises:
            OSError: The storage failed.
        """
        if "/" not in name:  # a direct child of the run directory
            add_upload(self.root, name)

    def delete_uncommitted_uploads(self) -> None:
        """Delete the files of upload functions that were not committed, while no upload runs.

        Raises:
            DamagedRunError: The index of the other checkpoints cannot be read.
            OSError: The storage failed.
        """
        for name in list_uploads(self.root):
            is_committed = self.path(name).read_or_none(MANIFEST_FILE) is not None
            # A function may write to a subdirectory and return that.
            if not is_committed and not any(
                other.startswith(f"{name}/") for other in list_names(self.root)
            ):
                self.delete(name)
            remove_upload(self.root, name)
        remove_uploads_directory(self.root)

    @abstractmethod
    def commit(self, draft: CheckpointDraft) -> Manifest:
        """Commit a checkpoint from the files that the ranks have persisted.

        Returns:
            The manifest with the sizes that were stored.

        Raises:
            FileExistsError: A committed checkpoint or a directory of the user has this name.
            CheckpointError: A file that a rank wrote is missing or truncated.
            OSError: The storage failed. Nothing is committed; earlier checkpoints are unchanged.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a checkpoint. It disappears in one step; its files are deleted afterwards.

        A missing checkpoint is not an error. The files of an external checkpoint are not deleted;
        the run only forgets it.
        """

    @abstractmethod
    def write_checksums(self, name: str) -> None:
        """Write the checksums of a checkpoint, unless the commit has already written them."""

    @abstractmethod
    def write_validation(self, manifest: Manifest, *, durable: bool) -> None:
        """Write the validation result next to the manifest of a checkpoint.

        Raises:
            OSError: The file cannot be written. The checkpoint is unchanged.
        """

    # -- all checkpoints

    @abstractmethod
    def list_damaged(self, committed: Collection[str] = ()) -> list[str]:
        """Return the names of directories that Drawbar created and that are not intact.

        Checkpoints in a newer format are not included.

        Args:
            committed: Names of checkpoints in the journal. They are included even if all files of
                Drawbar are missing, unless the training function chose the name.
        """

    def clean_up(self) -> None:
        """Remove uncommitted files, and the remaining files of interrupted deletions."""

    def _list_directories(self) -> list[str]:
        """Return the names of direct subdirectories of the run that can be checkpoints."""
        return self.root.list_directories()

    def names(self) -> list[str]:
        """Return the names of directories that can be checkpoints, without reading them."""
        return [*self._list_directories(), *list_names(self.root)]

    def list_committed(self, names: Collection[str] | None = None) -> list[Manifest]:
        """Return the manifests of committed checkpoints, oldest first, without checking files.

        Args:
            names: Names of the checkpoints to list; None lists all.
        """
        read = {
            name: read_manifest(self.path(name))
            for name in (self.names() if names is None else names)
        }
        manifests: Mapping[str, Manifest] = {
            name: manifest for name, manifest in read.items() if manifest
        }
        return assign_directory_names(manifests)

    def list_readable(self) -> tuple[list[Manifest], dict[str, str]]:
        """Return the readable manifests, and a dict of unreadable checkpoints.

        The dict maps the name of a checkpoint to the reason why it cannot be read.
        """
        names = [*self._list_directories()]
        manifests, errors = dict[str, Manifest](), dict[str, str]()
        try:
            names += list_names(self.root)
        except DamagedRunError as error:
            errors[INDEX_FILE] = str(error)
        for name in names:
            try:
                manifest = read_manifest(self.path(name))
            except (OSError, ImportError, ValueError) as error:  # also from external storage
                errors[name] = str(error)
            else:
                manifests |= {name: manifest} if manifest else {}
        return assign_directory_names(manifests), errors

    def list_intact(self) -> list[Manifest]:
        """Return the manifests of checkpoints that have every file with its size, oldest first."""
        return [manifest for manifest in self.list_committed() if not self.find_damage(manifest)]


def check_not_committed(checkpoints: CheckpointStore, name: str) -> None:
    """Raise `FileExistsError` if a committed checkpoint has this name."""
    if checkpoints.is_intact(name):
        raise make_already_committed_error(checkpoints.path(name))


def _find_damage(path: StoragePath, manifest: Manifest) -> str:
    try:
        check_file_sizes(path, manifest)
    except CheckpointError as error:
        return str(error)
    return ""


def make_name_conflict_error(path: Path | StoragePath) -> FileExistsError:
    """Return the error for a directory of the user that has the name of a checkpoint."""
    return FileExistsError(
        f"{path} exists, but Drawbar did not create it. Move it away, or use another "
        "checkpoint_dir_name."
    )


def make_default_name(index: int) -> str:
    """Return the default name of the checkpoint of a report."""
    return f"checkpoint_{index:06d}"


def is_default_name(name: str) -> bool:
    """Return True if a name looks like one of `make_default_name`."""
    return name.startswith("checkpoint_")


def commit_in_place(checkpoints: CheckpointStore, draft: CheckpointDraft) -> Manifest:
    """Commit every file in a directory where it is, and return the manifest."""
    name = draft.manifest.name
    if "/" in name:  # not a direct child of the run directory
        add_name(checkpoints.root, name)
    path = checkpoints.path(name)
    manifest = draft.manifest.with_files(path.list_user_files())
    finalize(path, manifest, draft)
    if draft.upload_name:
        remove_upload(checkpoints.root, draft.upload_name)
    if draft.durable and isinstance(path, LocalPath):
        fsync_path(path.parent)
    fault_points.maybe_stop_at("commit.renamed")
    return manifest


def finalize(directory: StoragePath, manifest: Manifest, draft: CheckpointDraft) -> None:
    """Write Drawbar's files into the directory of a checkpoint, the manifest last."""
    if draft.metadata is not None and directory.read_or_none(METADATA_FILE) is None:
        directory.write_file(METADATA_FILE, draft.metadata)
    sums = {
        path: value for staged in draft.staged_files for path, value in staged.checksums.items()
    }
    if sums:
        directory.write_file(CHECKSUMS_FILE, msgspec.json.encode(sums))
    fault_points.maybe_stop_at("commit.merged")
    # The manifest makes the directory a checkpoint, so all other files must exist before it.
    if isinstance(directory, LocalPath):
        write_manifest(directory, manifest, durable=draft.durable)
    else:
        check_file_sizes(directory, manifest)
        directory.write_file(MANIFEST_FILE, manifest.encode())
    fault_points.maybe_stop_at("commit.manifest")


MAX_HASHED_BYTES = 1_000_000_000
"""Maximum size up to which checksums are verified, which takes less time than loading."""


def split_damaged(
    checkpoints: CheckpointStore, committed: Sequence[Manifest]
) -> tuple[list[Manifest], dict[str, str]]:
    """Remove damaged checkpoints from the end of the list.

    Returns:
        The checkpoints up to the newest intact one, and the reason for each damaged one by name.
    """
    intact, damage = list(committed), dict[str, str]()
    while intact and (reason := _find_damage_reason(checkpoints, intact[-1])):
        damage[intact.pop().name] = reason
    return intact, damage


def uncommit(checkpoints: CheckpointStore, name: str) -> None:
    """Remove an intact checkpoint from the run, so that its name can be reused.

    Its files stay where the storage allows it:
      - in a local run directory, they are moved to `broken`
      - in an object store, which cannot rename, they are deleted
      - outside the run, they keep their place without the manifest and the checksums of Drawbar

    Raises:
        OSError: The storage failed. A second call continues.
    """
    root = checkpoints.root
    if is_external(name):
        for file in (MANIFEST_FILE, CHECKSUMS_FILE):
            checkpoints.path(name).delete_file(file)
    elif isinstance(root, LocalPath):
        _move_to_broken(root, name)
    checkpoints.delete(name)  # outside the run and after a move, only from the index


def quarantine(checkpoints: CheckpointStore, name: str) -> None:
    """Move a damaged checkpoint to `broken` in the run directory, so that its name can be reused.

    These directories are not moved:
      - directories without Drawbar's files whose name the user chose, which may be the user's
      - checkpoints in an object store, which cannot rename; the next commit replaces them
      - checkpoints that are not direct children of the run directory
    """
    path = checkpoints.path(name)
    if "/" in name or not isinstance(path, LocalPath) or not path.is_dir():
        return
    if is_default_name(name) or has_reserved_files(path):
        _move_to_broken(path.parent, name)


def _move_to_broken(run_path: Path, name: str) -> None:
    target = run_path / "broken" / f"{name}-{uuid.uuid4().hex[:6]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # nothing is left of the checkpoint
        os.rename(run_path / name, target)


def _find_damage_reason(checkpoints: CheckpointStore, manifest: Manifest) -> str:
    """Return how a checkpoint is damaged; "" if it is intact.

    Each file must have its size. Checksums are compared for local checkpoints of at most
    `MAX_HASHED_BYTES`. Remote checkpoints are not downloaded for this.
    """
    path = checkpoints.path(manifest.name)
    try:
        if isinstance(path, LocalPath) and manifest.nbytes <= MAX_HASHED_BYTES:
            checkpoints.get_checkpoint(manifest.name).verify()
        else:
            check_file_sizes(path, manifest)
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        if error.errno != errno.EIO:  # EIO: the disk has lost data
            raise
        return str(error)
    return ""
