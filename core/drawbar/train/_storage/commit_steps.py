"""Final steps of a commit: metadata, checksums, and manifest."""

from __future__ import annotations

from pathlib import Path

import msgspec

from drawbar.train._storage import fault_points
from drawbar.train._storage.checkpoint_store import CheckpointDraft
from drawbar.train._storage.contents import CHECKSUMS_FILE, MANIFEST_FILE, METADATA_FILE, list_files
from drawbar.train._storage.files import fsync_path
from drawbar.train._storage.manifest import (
    Manifest,
    check_file_sizes,
    list_user_files,
    write_manifest,
)
from drawbar.train._storage.remote_path import RemotePath


def commit_in_place(path: Path | RemotePath, draft: CheckpointDraft) -> Manifest:
    """Commit every file in a directory where it is, and return the manifest."""
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
    """Write Drawbar's files into a local directory, the manifest last."""
    if draft.metadata is not None and not (directory / METADATA_FILE).exists():
        (directory / METADATA_FILE).write_bytes(draft.metadata)
    fault_points.maybe_stop_at("commit.merged")
    # The manifest makes the directory a checkpoint, so all other files must exist before it.
    write_manifest(directory, manifest, durable=draft.durable)
    fault_points.maybe_stop_at("commit.manifest")


def finalize_remote(directory: RemotePath, manifest: Manifest, draft: CheckpointDraft) -> None:
    """Write Drawbar's files into a remote directory, after checking that all files exist."""
    if draft.metadata is not None and directory.read_or_none(METADATA_FILE) is None:
        directory.write(METADATA_FILE, draft.metadata)
    sums = {
        path: value for staged in draft.staged_files for path, value in staged.checksums.items()
    }
    if sums:
        directory.write(CHECKSUMS_FILE, msgspec.json.encode(sums))
    fault_points.maybe_stop_at("commit.merged")
    check_file_sizes(directory, manifest)
    directory.write(MANIFEST_FILE, manifest.encode())
    fault_points.maybe_stop_at("commit.manifest")
