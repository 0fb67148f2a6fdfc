"""Commit checkpoints on a local filesystem by renaming a staging directory.

Ranks write their files below `.staging`. When all ranks have finished, the controller merges the
files into one directory by renames, writes the manifest into it, and renames the directory to its
final name, which is atomic. A deletion first renames the checkpoint back into `.staging`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from drawbar._process.errors import UnsupportedFormatError
from drawbar._storage import fault_points
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.checkpoint_store import (
    CheckpointDraft,
    CheckpointStore,
    check_not_committed,
    commit_in_place,
    finalize,
    is_default_name,
    make_name_conflict_error,
)
from drawbar._storage.contents import (
    CHECKSUMS_FILE,
    VALIDATION_FILE,
    has_reserved_files,
    is_external,
)
from drawbar._storage.external_checkpoints import remove_name
from drawbar._storage.files import fsync_path, remove_tree
from drawbar._storage.manifest import Manifest, compute_checksum, read_manifest
from drawbar._storage.staging import AssignedFiles, StagedFiles, StagingArea, merge_staged
from drawbar._storage.storage_path import LocalPath


@dataclass(frozen=True)
class LocalCheckpointStore(CheckpointStore):
    """Checkpoints of a run in a local or mounted directory."""

    run_path: Path
    staging: StagingArea

    @property
    def root(self) -> LocalPath:
        return LocalPath(self.run_path)

    def get_child_name(self, checkpoint: Checkpoint) -> str | None:
        path = Path(checkpoint.path)
        inside = checkpoint.is_local and _is_same_path(path.parent, self.run_path)
        return path.name if inside and not path.name.startswith(".") else None

    def _get_relative_path(self, checkpoint: Checkpoint) -> str | None:
        if not checkpoint.is_local:
            return None
        path, run_path = os.path.realpath(checkpoint.path), os.path.realpath(self.run_path)
        return os.path.relpath(path, run_path) if f"{path}/".startswith(f"{run_path}/") else None

    def is_staged(self, path: Path) -> bool:
        return self.staging.has_directory(path)

    def persist(self, assigned: AssignedFiles) -> StagedFiles:
        return StagedFiles(self.staging.stage_files(assigned), tuple(assigned.files))

    def commit(self, draft: CheckpointDraft) -> Manifest:
        fault_points.maybe_stop_at("commit.start")
        name = draft.manifest.name
        check_not_committed(self, name)
        if draft.is_in_place:
            if not is_external(name):
                self.staging.replace_symlinks(self.run_path / name)
            return commit_in_place(self, draft)
        target = self.run_path / name
        self._clear_target(target)
        # If no rank has reported files, the checkpoint contains only metrics.
        merged = merge_staged(draft.staged_files) or self.staging.make_directory("empty")
        manifest = draft.manifest.with_stored_sizes(merged)
        finalize(LocalPath(merged), manifest, draft)
        os.rename(merged, target)
        # The rename changed the run directory. Without an fsync, a crash could undo the rename.
        if draft.durable:
            fsync_path(self.run_path)
        fault_points.maybe_stop_at("commit.renamed")
        return manifest

    def _clear_target(self, target: Path) -> None:
        if not target.exists():
            return
        # It is not intact, so if it has Drawbar's files, it is a damaged checkpoint.
        if not (target.is_dir() and has_reserved_files(target)):
            raise make_name_conflict_error(target)
        self.staging.move_to_trash(target)

    def delete(self, name: str) -> None:
        if not is_external(name):
            remove_tree(self.staging.move_to_trash(self.run_path / name))
        if "/" in name:  # not a direct child of the run directory
            remove_name(self.root, name)

    def write_checksums(self, name: str) -> None:
        directory = self.path(name)
        manifest = read_manifest(directory)
        if manifest is None or not isinstance(directory, LocalPath):
            return
        try:
            sums = {file.path: compute_checksum(directory / file.path) for file in manifest.files}
            self._write_reserved_file(name, CHECKSUMS_FILE, msgspec.json.encode(sums))
        except FileNotFoundError:
            return  # retention deleted the checkpoint in the meantime

    def write_validation(self, manifest: Manifest, *, durable: bool) -> None:
        self._write_reserved_file(
            manifest.name, VALIDATION_FILE, manifest.encode(), durable=durable
        )

    def _write_reserved_file(
        self, name: str, file: str, data: bytes, *, durable: bool = False
    ) -> None:
        # An external checkpoint may be on another filesystem, to which no file can be renamed.
        temp_directory = None if is_external(name) else self.staging.path
        self.path(name).write_file(file, data, durable=durable, temp_directory=temp_directory)

    def list_damaged(self, committed: Collection[str] = ()) -> list[str]:
        default_names = set(filter(is_default_name, committed))
        damaged = []
        for name in self._list_directories():
            if name in default_names or has_reserved_files(self.run_path / name):
                with suppress(UnsupportedFormatError):  # only the newer version can check it
                    if not self.is_intact(name):
                        damaged.append(name)
        return damaged

    def _list_directories(self) -> list[str]:
        return super()._list_directories() if self.run_path.is_dir() else []


def _is_same_path(path: Path, other: Path) -> bool:
    """Return True if two paths refer to the same file or directory."""
    try:
        return path == other or path.samefile(other)
    except OSError:
        return False
