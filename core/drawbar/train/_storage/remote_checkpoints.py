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
from drawbar.train._storage.checkpoint_store import CheckpointStore, Draft, taken
from drawbar.train._storage.contents import MANIFEST, PENDING, VALIDATION, is_outside, is_own
from drawbar.train._storage.files import write_atomically
from drawbar.train._storage.in_place import commit_in_place, complete_folder
from drawbar.train._storage.manifest import Manifest
from drawbar.train._storage.places import add_place, remove_place
from drawbar.train._storage.remote_folder import Folder, same_filesystem
from drawbar.train._storage.retries import told_when_slow
from drawbar.train._storage.staging import Part, Share


@dataclass(frozen=True)
class RemoteCheckpoints(CheckpointStore):
    """The checkpoints of a run in a folder that is not mounted."""

    run: Folder

    @property
    def home(self) -> Folder:
        return self.run

    def name_of(self, checkpoint: Checkpoint) -> str | None:
        if checkpoint.is_local:
            return None
        folder = Folder(checkpoint.path, checkpoint.filesystem)
        return folder.name if folder.parent.same_as(self.run) else None

    def _path_inside(self, checkpoint: Checkpoint) -> str | None:
        if checkpoint.is_local or not same_filesystem(checkpoint.filesystem, self.run.filesystem):
            return None
        path, run = f"{checkpoint.path}/", f"{self.run.path}/"
        return (path.removeprefix(run)[:-1] or ".") if path.startswith(run) else None

    def is_staged(self, path: Path) -> bool:
        """Nothing that is local lies where a commit can take it."""
        return False

    def persist(self, share: Share) -> Part:
        """Write these files under the checkpoint's name. Without the manifest nobody sees them."""
        folder = self.run / share.name
        # Before the first file: what a kill leaves here is told from the user's own folders by this
        # mark.
        _claim(folder)
        with told_when_slow(f"writing checkpoint {share.name} of {share.label} to {self.run}"):
            checksums = folder.upload(share.source, share.files)
        return Part(None, tuple(share.files), checksums)

    def commit(self, draft: Draft) -> Manifest:
        """Check that all ranks' files are there, remove what is not theirs, write the manifest."""
        fault_points.reached("commit.start")
        name = draft.manifest.name
        self._refuse_committed(name)
        if draft.in_place:
            if "/" in name:
                add_place(self.run, name)
            return commit_in_place(self.place(name), draft)
        folder = self.run / name
        # An attempt that was given up may have left other files under this name.
        _remove_leftovers(folder, draft.parts)
        complete_folder(folder, draft.manifest, draft)
        fault_points.reached("commit.renamed")
        return draft.manifest

    def delete(self, name: str) -> None:
        """Delete a checkpoint: gone with its manifest, its other files follow."""
        if not is_outside(name):
            folder = self.run / name
            folder.write(PENDING, b"")  # what a kill leaves of it is Drawbar's to sweep
            folder.delete_file(MANIFEST)
            folder.delete()
        if "/" in name:
            remove_place(self.run, name)

    def write_checksums(self, name: str) -> None:
        """There is nothing left to do: the commit wrote them."""

    def keep_validation(self, manifest: Manifest, *, durable: bool) -> None:
        place = self.place(manifest.name)
        if isinstance(place, Folder):
            place.write(VALIDATION, manifest.encode())
        else:
            write_atomically(place / VALIDATION, manifest.encode(), durable=durable)

    def damaged(self) -> list[str]:
        """List the names of committed checkpoints that have lost files.

        A directory without a manifest is no damage here: that is how a kill leaves one.
        """
        return [each.name for each in self.legible()[0] if not self.is_intact(each.name)]

    def sweep(self) -> None:
        """Here there is no staging area that would hold it: it lies under the names it was for."""
        for name in self.leftovers():
            (self.run / name).delete()

    def leftovers(self) -> list[str]:
        """List the folders that Drawbar has written into and that are no checkpoint."""
        return [name for name in self._folders() if _is_leftover(self.run / name)]

    def _folders(self) -> list[str]:
        return self.run.folders()


def _claim(folder: Folder) -> None:
    """Mark a folder as one that a checkpoint is written into, unless it is the user's.

    Raises:
        FileExistsError: It is.
    """
    found = [file.path for file in folder.list_files()]
    if found and not any(map(is_own, found)):
        raise taken(folder)
    if PENDING not in found:
        folder.write(PENDING, b"")


def _remove_leftovers(folder: Folder, parts: Sequence[Part]) -> None:
    wanted = {file.path for part in parts for file in part.files}
    found = [file.path for file in folder.list_files() if file.path not in wanted]
    # A manifest that was left goes first: without it nobody takes the rest for a checkpoint.
    for path in sorted(found, key=lambda path: path != MANIFEST):
        folder.delete_file(path)


def _is_leftover(folder: Folder) -> bool:
    """Whether Drawbar has written into a folder that is no checkpoint, nor was one."""
    own = [file.path for file in folder.list_files() if is_own(file.path)]
    return bool(own) and MANIFEST not in own
