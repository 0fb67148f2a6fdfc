"""Checks of the directory of a checkpoint before its files are stored."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from drawbar._base.wording import is_encodable
from drawbar._storage.contents import MANIFEST_FILE, DirectoryContents, FileEntry
from drawbar._storage.journal_file import JOURNAL_FILE
from drawbar._storage.manifest import read_manifest
from drawbar._storage.remote_path import RemotePath
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.run_files import RUN_FILE_NAMES, TRAINER_FILE
from drawbar._storage.storage_path import LocalPath

_MAX_PATH_BYTES = 4095
_STAGING_PATH_BYTES = 200  # upper limit for the part of a staging path below the run directory
_INTERNAL_DIRECTORIES = ("logs", "stacks", ".workers", ".uncommitted")


def check_directory(directory: Path, run: RunDirectory) -> None:
    """Check that a directory is neither internal to the run nor a parent of it.

    Raises:
        ValueError: It is the storage path, the run directory, a parent of them, or an internal
            directory of the run.
    """
    real_path, identity = Path(os.path.realpath(directory)), os.stat(directory)
    for local_path in run.list_local_paths():
        root = Path(os.path.realpath(local_path))
        internal = [root / name for name in _INTERNAL_DIRECTORIES]
        for path in internal:
            if real_path.is_relative_to(path):
                raise _make_reserved_error(directory, path)
        for path in (*internal, root, *root.parents, RunDirectory(root).staging.path):
            if _has_identity(path, identity):
                raise _make_reserved_error(directory, path)


def check_remote_directory(path: RemotePath) -> None:
    """Check that a remote directory in the run directory is not one of the run's own.

    Raises:
        ValueError: It is.
    """
    if path.name in RUN_FILE_NAMES:
        raise _make_reserved_error(path, path)


def _has_identity(path: Path, identity: os.stat_result) -> bool:
    # Device and inode: symbolic links and bind mounts are other paths to the same directory.
    try:
        return os.path.samestat(os.stat(path), identity)
    except OSError:
        return False


def _make_reserved_error(directory: object, reserved_path: object) -> ValueError:
    return ValueError(
        f"report() cannot use {directory} as a checkpoint, because {reserved_path} contains files "
        "of the run. Save into a separate directory, such as one of checkpoint_dir()."
    )


def check_files(directory: Path, contents: DirectoryContents, run: RunDirectory) -> None:
    """Check the file names of a checkpoint.

    Raises:
        ValueError: A name is reserved, too long, or not UTF-8.
    """
    # Check before anything is written: a path that is too long would fail during the commit.
    max_path_bytes = _MAX_PATH_BYTES - _STAGING_PATH_BYTES - len(os.fsencode(run.local_path))
    for file in contents.files:
        if not file.path.isascii() and not is_encodable(file.path):
            raw_path = os.fsencode(directory / file.path)
            raise ValueError(
                f"A checkpoint cannot contain {raw_path!r}, because its name is not UTF-8. "
                "Rename the file."
            )
        if len(file.path) * 4 > max_path_bytes and len(file.path.encode()) > max_path_bytes:
            raise ValueError(
                f"A checkpoint in {run.local_path} cannot contain {directory / file.path}, because "
                f"its path there would be longer than {_MAX_PATH_BYTES} bytes. Shorten the path."
            )
    # A directory with a manifest is a copy of a checkpoint, and may contain reserved names.
    if contents.reserved_files and read_manifest(LocalPath(directory)) is None:
        raise ValueError(
            f"A checkpoint cannot contain {directory / contents.reserved_files[0]}, because "
            "Drawbar reserves this name. Rename the file."
        )


def can_move(directory: Path, files: Sequence[FileEntry], run: RunDirectory) -> bool:
    """Return whether a directory may be moved and deleted.

    Committed checkpoints, directories of other runs, and directories that contain the working
    directory or the user's home directory are copied instead.
    """
    path = os.path.realpath(directory)
    for protected_path in (os.getcwd(), os.path.realpath(os.path.expanduser("~"))):
        if f"{protected_path}/".startswith(f"{path.rstrip('/')}/"):
            return False
    while path != os.path.dirname(path):
        if os.path.exists(f"{path}/{MANIFEST_FILE}"):
            return False
        if _is_run_directory(path):
            return os.path.samefile(path, run.local_path)
        path = os.path.dirname(path)
    journals = (file.path for file in files if file.path.endswith(f"/{run.journal_path.name}"))
    return not any(_is_run_directory(str((directory / journal).parent)) for journal in journals)


def _is_run_directory(path: str) -> bool:
    # Check for two files: a user's file may have the name of the journal.
    return all(os.path.exists(f"{path}/{name}") for name in (JOURNAL_FILE, TRAINER_FILE))
