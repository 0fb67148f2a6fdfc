"""The commit protocol of an object store, or of anything pyarrow can open: the manifest comes last.

There is no rename, so the manifest is the commit: ranks write their files under the checkpoint's
name, and when the last one has, the controller checks what is there and writes the manifest.
Deleting removes the manifest first. A directory without one that was marked as Drawbar's is a
leftover, swept at the next start. docs/decisions/0005-remote-storage.md says why it is so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drawbar.train._storage import fault_points
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.checkpoint_store import (
    CheckpointDraft,
    CheckpointStore,
    make_name_conflict_error,
)
from drawbar.train._storage.commit_steps import commit_in_place, finalize_remote
from drawbar.train._storage.contents import (
    MANIFEST_FILE,
    PENDING_MARKER,
    VALIDATION_FILE,
    is_external,
    is_reserved,
)
from drawbar.train._storage.external_checkpoints import add_name, remove_name
from drawbar.train._storage.files import write_atomically
from drawbar.train._storage.filesystem import RemotePath, is_same_filesystem
from drawbar.train._storage.manifest import Manifest
from drawbar.train._storage.retries import warn_if_slow
from drawbar.train._storage.staging import AssignedFiles, StagedFiles


@dataclass(frozen=True)
class RemoteCheckpointStore(CheckpointStore):
    """The checkpoints of a run in a folder that is not mounted."""

    run_path: RemotePath

    @property
    def root(self) -> RemotePath:
        return self.run_path

    def get_child_name(self, checkpoint: Checkpoint) -> str | None:
        if checkpoint.is_local:
            return None
        folder = RemotePath(checkpoint.path, checkpoint.filesystem)
        return folder.name if folder.parent.is_same(self.run_path) else None

    def _get_relative_path(self, checkpoint: Checkpoint) -> str | None:
        if checkpoint.is_local or not is_same_filesystem(
            checkpoint.filesystem, self.run_path.filesystem
        ):
            return None
        path, run = f"{checkpoint.path}/", f"{self.run_path.fs_path}/"
        return (path.removeprefix(run)[:-1] or ".") if path.startswith(run) else None

    def is_staged(self, path: Path) -> bool:
        """Nothing that is local lies where a commit can take it."""
        return False

    def persist(self, share: AssignedFiles) -> StagedFiles:
        """Write these files under the checkpoint's name. Without the manifest nobody sees them."""
        folder = self.run_path / share.checkpoint_name
        # Before the first file: what a kill leaves here is told from the user's own folders by this
        # mark.
        _mark_pending(folder)
        with warn_if_slow(
            f"writing checkpoint {share.checkpoint_name} of {share.label} to {self.run_path}"
        ):
            checksums = folder.upload_files(share.source_directory, share.files)
        return StagedFiles(None, tuple(share.files), checksums)

    def commit(self, draft: CheckpointDraft) -> Manifest:
        """Check that all ranks' files are there, remove what is not theirs, write the manifest."""
        fault_points.maybe_stop_at("commit.start")
        name = draft.manifest.name
        self._check_not_committed(name)
        if draft.is_in_place:
            if "/" in name:
                add_name(self.run_path, name)
            return commit_in_place(self.path(name), draft)
        folder = self.run_path / name
        # An attempt that was given up may have left other files under this name.
        _remove_unlisted(folder, draft.staged_files)
        finalize_remote(folder, draft.manifest, draft)
        fault_points.maybe_stop_at("commit.renamed")
        return draft.manifest

    def delete(self, name: str) -> None:
        """Delete a checkpoint: gone with its manifest, its other files follow."""
        if not is_external(name):
            folder = self.run_path / name
            folder.write(PENDING_MARKER, b"")  # what a kill leaves of it is Drawbar's to sweep
            folder.delete_file(MANIFEST_FILE)
            folder.delete_tree()
        if "/" in name:
            remove_name(self.run_path, name)

    def write_checksums(self, name: str) -> None:
        """There is nothing left to do: the commit wrote them."""

    def write_validation(self, manifest: Manifest, *, durable: bool) -> None:
        place = self.path(manifest.name)
        if isinstance(place, RemotePath):
            place.write(VALIDATION_FILE, manifest.encode())
        else:
            write_atomically(place / VALIDATION_FILE, manifest.encode(), durable=durable)

    def list_damaged(self) -> list[str]:
        """List the names of committed checkpoints that have lost files.

        A directory without a manifest is no damage here: that is how a kill leaves one.
        """
        return [each.name for each in self.list_readable()[0] if not self.is_intact(each.name)]

    def clean_up(self) -> None:
        """Here there is no staging area that would hold it: it lies under the names it was for."""
        for name in self.list_uncommitted():
            (self.run_path / name).delete_tree()

    def list_uncommitted(self) -> list[str]:
        """List the folders that Drawbar has written into and that are no checkpoint."""
        return [name for name in self._list_directories() if _is_uncommitted(self.run_path / name)]

    def _list_directories(self) -> list[str]:
        return self.run_path.list_directories()


def _mark_pending(folder: RemotePath) -> None:
    """Mark a folder as one that a checkpoint is written into, unless it is the user's.

    Raises:
        FileExistsError: It is.
    """
    found = [file.path for file in folder.list_files()]
    if found and not any(map(is_reserved, found)):
        raise make_name_conflict_error(folder)
    if PENDING_MARKER not in found:
        folder.write(PENDING_MARKER, b"")


def _remove_unlisted(folder: RemotePath, parts: Sequence[StagedFiles]) -> None:
    wanted = {file.path for part in parts for file in part.files}
    found = [file.path for file in folder.list_files() if file.path not in wanted]
    # A manifest that was left goes first: without it nobody takes the rest for a checkpoint.
    for path in sorted(found, key=lambda path: path != MANIFEST_FILE):
        folder.delete_file(path)


def _is_uncommitted(folder: RemotePath) -> bool:
    """Whether Drawbar has written into a folder that is no checkpoint, nor was one."""
    own = [file.path for file in folder.list_files() if is_reserved(file.path)]
    return bool(own) and MANIFEST_FILE not in own
