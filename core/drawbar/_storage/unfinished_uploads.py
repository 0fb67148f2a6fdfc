"""Record the checkpoints that upload functions are writing, in the directory `.uploads` of a run.

A `checkpoint_upload_fn` writes to the final directory of a checkpoint. If its attempt fails, these
files must not become part of a later checkpoint. Before the ranks call the function, the controller
records the name of a directory that does not exist yet. So the files of a recorded directory
without a manifest belong to an upload that was not committed, and can be deleted. A directory that
existed before belongs to the user; it is not recorded and never deleted.
"""

from __future__ import annotations

import contextlib
import os

from drawbar._storage.files import remove_tree
from drawbar._storage.storage_path import LocalPath, StoragePath

_UPLOADS_DIRECTORY = ".uploads"


def add_upload(run_path: StoragePath, name: str) -> None:
    """Record that ranks are about to write a checkpoint, unless its directory exists already.

    Raises:
        OSError: The storage failed.
    """
    path, uploads = run_path / name, run_path / _UPLOADS_DIRECTORY
    # Also a broken link belongs to the user.
    if os.path.lexists(path) if isinstance(path, LocalPath) else path.exists():
        return
    if isinstance(uploads, LocalPath):
        uploads.mkdir(exist_ok=True)
    uploads.write_file(name, b"")


def remove_upload(run_path: StoragePath, name: str) -> None:
    """Remove the record of an upload, because it is committed or deleted.

    Raises:
        OSError: The storage failed.
    """
    uploads = run_path / _UPLOADS_DIRECTORY
    if isinstance(uploads, LocalPath):
        remove_tree(uploads / name)
    else:
        uploads.delete_file(name)


def remove_uploads_directory(run_path: StoragePath) -> None:
    """Remove the empty directory of the records. Call it only while no upload begins."""
    uploads = run_path / _UPLOADS_DIRECTORY
    if isinstance(uploads, LocalPath):
        with contextlib.suppress(OSError):  # it does not exist, or an upload is recorded
            uploads.rmdir()


def list_uploads(run_path: StoragePath) -> list[str]:
    """Return the names of the checkpoints whose uploads are recorded.

    Raises:
        OSError: The storage failed.
    """
    try:
        files = (run_path / _UPLOADS_DIRECTORY).list_user_files()
    except FileNotFoundError:
        return []
    return [file.path for file in files]
