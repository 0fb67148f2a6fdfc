"""The last steps of a commit, where the files of a checkpoint lie already."""

from __future__ import annotations

from pathlib import Path

import msgspec

from drawbar.train._storage import fault_points
from drawbar.train._storage.checkpoint_store import Draft
from drawbar.train._storage.contents import CHECKSUMS, MANIFEST, METADATA, list_files
from drawbar.train._storage.files import sync
from drawbar.train._storage.manifest import Manifest, check_files, user_files, write_manifest
from drawbar.train._storage.remote_folder import Folder


def commit_in_place(place: Path | Folder, draft: Draft) -> Manifest:
    """Commit whatever lies at a place. Returns what that is."""
    if isinstance(place, Folder):
        manifest = draft.manifest.holding(user_files(place))
        complete_folder(place, manifest, draft)
    else:
        manifest = draft.manifest.holding(list_files(place))
        complete_directory(place, manifest, draft)
        if draft.durable:
            sync(place.parent)
    fault_points.reached("commit.renamed")
    return manifest


def complete_directory(directory: Path, manifest: Manifest, draft: Draft) -> None:
    """Write Drawbar's own files into a local directory, the manifest last."""
    if draft.metadata is not None and not (directory / METADATA).exists():
        (directory / METADATA).write_bytes(draft.metadata)
    fault_points.reached("commit.merged")
    # With this it is a checkpoint: all else has to be there.
    write_manifest(directory, manifest, durable=draft.durable)
    fault_points.reached("commit.manifest")


def complete_folder(folder: Folder, manifest: Manifest, draft: Draft) -> None:
    """Do the same in a folder that is not mounted, and check that all files are there."""
    if draft.metadata is not None and folder.read_if_there(METADATA) is None:
        folder.write(METADATA, draft.metadata)
    sums = {path: value for part in draft.parts for path, value in part.checksums.items()}
    if sums:
        folder.write(CHECKSUMS, msgspec.json.encode(sums))
    fault_points.reached("commit.merged")
    check_files(folder, manifest)
    folder.write(MANIFEST, manifest.encode())
    fault_points.reached("commit.manifest")
