"""The last steps of a commit, where the files of a checkpoint lie already."""

from __future__ import annotations

from pathlib import Path

import msgspec

from drawbar.train._storage import fault_points
from drawbar.train._storage.checkpoint_store import CheckpointDraft
from drawbar.train._storage.contents import CHECKSUMS_FILE, MANIFEST_FILE, METADATA_FILE, list_files
from drawbar.train._storage.files import fsync_path
from drawbar.train._storage.filesystem import RemotePath
from drawbar.train._storage.manifest import (
    Manifest,
    check_file_sizes,
    list_user_files,
    write_manifest,
)


def commit_in_place(path: Path | RemotePath, draft: CheckpointDraft) -> Manifest:
    """Commit whatever lies at a place. Returns what that is."""
    if isinstance(path, RemotePath):
        manifest = draft.manifest.with_files(list_user_files(path))
        finalize_remote(path, manifest, draft)
    else:
        manifest = draft.manifest.with_files(list_files(path))
        finalize_local(path, manifest, draft)
        if draft.durable:
            fsync_path(path.parent)
    fault_points.maybe_stop_at("commit.renamed")
    return manifest


def finalize_local(directory: Path, manifest: Manifest, draft: CheckpointDraft) -> None:
    """Write Drawbar's own files into a local directory, the manifest last."""
    if draft.metadata is not None and not (directory / METADATA_FILE).exists():
        (directory / METADATA_FILE).write_bytes(draft.metadata)
    fault_points.maybe_stop_at("commit.merged")
    # With this it is a checkpoint: all else has to be there.
    write_manifest(directory, manifest, durable=draft.durable)
    fault_points.maybe_stop_at("commit.manifest")


def finalize_remote(folder: RemotePath, manifest: Manifest, draft: CheckpointDraft) -> None:
    """Do the same in a folder that is not mounted, and check that all files are there."""
    if draft.metadata is not None and folder.read_or_none(METADATA_FILE) is None:
        folder.write(METADATA_FILE, draft.metadata)
    sums = {path: value for part in draft.staged_files for path, value in part.checksums.items()}
    if sums:
        folder.write(CHECKSUMS_FILE, msgspec.json.encode(sums))
    fault_points.maybe_stop_at("commit.merged")
    check_file_sizes(folder, manifest)
    folder.write(MANIFEST_FILE, manifest.encode())
    fault_points.maybe_stop_at("commit.manifest")
