"""The commit protocol of a local or mounted filesystem: a rename makes a checkpoint.

Ranks put their files below `.staging`; when the last rank has, the controller merges them into one
directory by renames, writes the manifest into it, and renames that directory to its final name: one
step that either happened or did not. Deleting goes the same way back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from drawbar.train._storage import fault_points
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.checkpoint_store import CheckpointStore, Draft, taken
from drawbar.train._storage.contents import (
    CHECKSUMS,
    VALIDATION,
    holds_own,
    is_folder,
    is_outside,
)
from drawbar.train._storage.files import remove_tree, sync, write_atomically
from drawbar.train._storage.in_place import commit_in_place, complete_directory
from drawbar.train._storage.journal_file import JOURNAL, committed_names
from drawbar.train._storage.manifest import (
    Manifest,
    checksum,
    read_file,
    read_manifest,
)
from drawbar.train._storage.places import add_place, remove_place
from drawbar.train._storage.remote_folder import Folder
from drawbar.train._storage.staging import Part, Share, StagingArea, merge


@dataclass(frozen=True)
class LocalCheckpoints(CheckpointStore):
    """The checkpoints of a run in a directory that is mounted here."""

    run: Path
    staging: StagingArea

    @property
    def home(self) -> Path:
        return self.run

    def name_of(self, checkpoint: Checkpoint) -> str | None:
        path = Path(checkpoint.path)
        inside = checkpoint.is_local and _is_same(path.parent, self.run)
        return path.name if inside and not path.name.startswith(".") else None

    def _path_inside(self, checkpoint: Checkpoint) -> str | None:
        if not checkpoint.is_local:
            return None
        path, run = os.path.realpath(checkpoint.path), os.path.realpath(self.run)
        return os.path.relpath(path, run) if f"{path}/".startswith(f"{run}/") else None

    def is_staged(self, path: Path) -> bool:
        return self.staging.holds(path)

    def persist(self, share: Share) -> Part:
        return Part(self.staging.put(share), tuple(share.files))

    def commit(self, draft: Draft) -> Manifest:
        fault_points.reached("commit.start")
        if draft.in_place:
            return self._commit_in_place(draft)
        target = self.run / draft.manifest.name
        self._make_way(target)
        # Ranks may offer folders without files: the checkpoint then has its metrics alone.
        merged = merge(draft.parts) or self.staging.new("empty")
        manifest = draft.manifest.as_stored(merged)
        complete_directory(merged, manifest, draft)
        os.rename(merged, target)
        # The checkpoint's name is an entry of the run's folder, which has to reach the disk too.
        if draft.durable:
            sync(self.run)
        fault_points.reached("commit.renamed")
        return manifest

    def _commit_in_place(self, draft: Draft) -> Manifest:
        name = draft.manifest.name
        self._refuse_committed(name)
        if not is_outside(name):
            self.staging.replace_links(self.run / name)
        if "/" in name:
            add_place(self.run, name)
        return commit_in_place(self.place(name), draft)

    def _make_way(self, target: Path) -> None:
        if not target.exists():
            return
        self._refuse_committed(target.name)
        if target.name not in self.damaged():
            raise taken(target)
        self.staging.bury(target)

    def delete(self, name: str) -> None:
        if not is_outside(name):
            remove_tree(self.staging.bury(self.run / name))
        if "/" in name:
            remove_place(self.run, name)

    def write_checksums(self, name: str) -> None:
        directory = self.place(name)
        manifest = read_manifest(directory)
        if manifest is None or isinstance(directory, Folder):
            return
        try:
            sums = {file.path: checksum(directory / file.path) for file in manifest.files}
            self._add(name, CHECKSUMS, msgspec.json.encode(sums))
        except FileNotFoundError:
            return  # retention deleted the checkpoint in the meantime

    def keep_validation(self, manifest: Manifest, *, durable: bool) -> None:
        self._add(manifest.name, VALIDATION, manifest.encode(), durable=durable)

    def _add(self, name: str, file: str, data: bytes, *, durable: bool = False) -> None:
        place, by_way_of = self.place(name), None if is_outside(name) else self.staging.path
        if isinstance(place, Folder):
            place.write(file, data)
        else:
            write_atomically(place / file, data, durable=durable, by_way_of=by_way_of)

    def damaged(self) -> list[str]:
        return [
            entry.name
            for entry in os.scandir(self.run)
            if is_folder(entry) and self._was_made(entry.name) and not self.is_intact(entry.name)
        ]

    def _was_made(self, name: str) -> bool:
        """Whether Drawbar has made a checkpoint of this name: else it is a folder of the user's."""
        if holds_own(self.run / name):
            return True
        if not name.startswith("checkpoint_"):
            return False
        # All of Drawbar's own files in it may be lost; the journal still knows what it has made.
        return name in committed_names(read_file(self.run, JOURNAL) or b"")

    def _folders(self) -> list[str]:
        found = os.scandir(self.run) if self.run.is_dir() else ()
        return [each.name for each in found if is_folder(each) and not each.name.startswith(".")]


def _is_same(path: Path, other: Path) -> bool:
    """Whether two paths lead to one place."""
    try:
        return path == other or path.samefile(other)
    except OSError:
        return False
