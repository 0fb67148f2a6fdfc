"""Commit checkpoints on a remote filesystem by writing the manifest last.

Object stores cannot rename, so the manifest is the commit. Ranks write their files under the name
of the checkpoint. When all ranks have finished, the controller checks the files and writes the
manifest. A deletion removes the manifest first. A directory that has a file of Drawbar but no
manifest is uncommitted, and is deleted at the next start.

See docs/decisions/0005-remote-storage.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from drawbar._storage import fault_points
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.checkpoint_store import (
    CheckpointDraft,
    CheckpointStore,
    check_not_committed,
    commit_in_place,
    finalize,
    make_name_conflict_error,
)
from drawbar._storage.contents import (
    MANIFEST_FILE,
    PENDING_MARKER,
    VALIDATION_FILE,
    is_external,
    is_reserved,
    is_temporary,
)
from drawbar._storage.external_checkpoints import remove_name
from drawbar._storage.manifest import Manifest
from drawbar._storage.remote_path import (
    RemotePath,
    delete_temporary_files,
    is_same_filesystem,
    upload_files,
)
from drawbar._storage.retries import warn_if_slow
from drawbar._storage.staging import AssignedFiles, StagedFiles


@dataclass(frozen=True)
class RemoteCheckpointStore(CheckpointStore):
    """Checkpoints of a run in a remote directory."""

    run_path: RemotePath

    @property
    def root(self) -> RemotePath:
        return self.run_path

    def get_child_name(self, checkpoint: Checkpoint) -> str | None:
        if checkpoint.is_local:
            return None
        directory = RemotePath(checkpoint.path, checkpoint.filesystem)
        is_child = directory.parent.fs_path == self.run_path.fs_path and is_same_filesystem(
            directory.filesystem, self.run_path.filesystem
        )
        return directory.name if is_child else None

    def _get_relative_path(self, checkpoint: Checkpoint) -> str | None:
        if checkpoint.is_local or not is_same_filesystem(
            checkpoint.filesystem, self.run_path.filesystem
        ):
            return None
        path, run_path = f"{checkpoint.path}/", f"{self.run_path.fs_path}/"
        return (path.removeprefix(run_path)[:-1] or ".") if path.startswith(run_path) else None

    def is_staged(self, path: Path) -> bool:
        """Return False: a commit cannot use any local directory."""
        return False

    def reserve(self, name: str) -> None:
        """Mark the directory of a checkpoint as uncommitted.

        The marker distinguishes files of a killed process from directories of the user. Only the
        controller writes it: thousands of ranks that list a directory overload an object store.
        """
        _mark_pending(self.run_path / name)

    def persist(self, assigned: AssignedFiles) -> StagedFiles:
        """Write files under the name of the checkpoint, where they are ignored until the commit."""
        directory = self.run_path / assigned.checkpoint_name
        with warn_if_slow(
            f"writing checkpoint {assigned.checkpoint_name} of {assigned.label} to {self.run_path}"
        ):
            checksums = upload_files(assigned.source_directory, directory, assigned.files)
        return StagedFiles(None, tuple(assigned.files), checksums)

    def commit(self, draft: CheckpointDraft) -> Manifest:
        """Check that all files exist, remove files of other attempts, and write the manifest."""
        fault_points.maybe_stop_at("commit.start")
        name = draft.manifest.name
        check_not_committed(self, name)
        if draft.is_in_place:
            return commit_in_place(self, draft)
        directory = self.run_path / name
        # An abandoned attempt may have left other files under this name.
        _remove_unlisted(directory, draft.staged_files)
        finalize(directory, draft.manifest, draft)
        with contextlib.suppress(OSError):  # a manifest makes it meaningless
            directory.delete_file(PENDING_MARKER)
        fault_points.maybe_stop_at("commit.renamed")
        return draft.manifest

    def delete(self, name: str) -> None:
        """Delete the manifest of a checkpoint first, and then its other files."""
        if not is_external(name):
            directory = self.run_path / name
            directory.write_file(PENDING_MARKER, b"")  # so that clean_up() finds it after a kill
            directory.delete_file(MANIFEST_FILE)
            directory.delete_tree()
        if "/" in name:
            remove_name(self.run_path, name)

    def write_checksums(self, name: str) -> None:
        """Do nothing, because the commit has already written them."""

    def write_validation(self, manifest: Manifest, *, durable: bool) -> None:
        self.path(manifest.name).write_file(VALIDATION_FILE, manifest.encode(), durable=durable)

    def list_damaged(self, committed: Collection[str] = ()) -> list[str]:
        """Return the names of committed checkpoints that have lost files.

        A directory without a manifest is not damaged: a killed process leaves it like that.
        """
        return [
            manifest.name
            for manifest in self.list_readable()[0]
            if not self.is_intact(manifest.name)
        ]

    def clean_up(self) -> None:
        """Delete temporary files and uncommitted directories, since there is no staging area."""
        delete_temporary_files(self.run_path)
        for name in self.list_uncommitted():
            (self.run_path / name).delete_tree()

    def list_uncommitted(self) -> list[str]:
        """Return the names of directories that Drawbar has written to, but not committed."""
        return [name for name in self._list_directories() if _is_uncommitted(self.run_path / name)]


def _mark_pending(directory: RemotePath) -> None:
    """Mark a directory as an uncommitted checkpoint.

    Raises:
        FileExistsError: The directory belongs to the user.
    """
    paths = [file.path for file in directory.list_files()]
    if paths and not any(map(is_reserved, paths)):
        raise make_name_conflict_error(directory)
    if PENDING_MARKER not in paths:
        directory.write_file(PENDING_MARKER, b"")


def _remove_unlisted(directory: RemotePath, staged_files: Sequence[StagedFiles]) -> None:
    listed = {file.path for staged in staged_files for file in staged.files}
    # After a kill before the manifest is written, the marker identifies the directory as Drawbar's.
    listed.add(PENDING_MARKER)
    unlisted = [file.path for file in directory.list_files() if file.path not in listed]
    # Delete a remaining manifest first, so that the other files do not look like a checkpoint.
    for path in sorted(unlisted, key=lambda path: path != MANIFEST_FILE):
        directory.delete_file(path)


def _is_uncommitted(directory: RemotePath) -> bool:
    """Return True if Drawbar has written to a directory that has no manifest."""
    paths = [file.path for file in directory.list_files()]
    # A killed process may also leave temporary files in other directories, such as `logs`.
    reserved = [path for path in paths if is_reserved(path) and not is_temporary(path)]
    return bool(reserved) and MANIFEST_FILE not in reserved
