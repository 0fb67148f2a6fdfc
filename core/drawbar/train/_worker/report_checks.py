"""Options of report() for a checkpoint, and checks of them and of the checkpoint directory.

All checks run on the reporting rank before any file is changed and before any message is sent.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drawbar._base.wording import is_encodable
from drawbar._storage.background_writer import BackgroundWrite
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.contents import MANIFEST_FILE, DirectoryContents, FileEntry
from drawbar._storage.journal_file import JOURNAL_FILE
from drawbar._storage.manifest import read_manifest
from drawbar._storage.remote_path import RemotePath
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.run_files import RUN_FILE_NAMES, TRAINER_FILE
from drawbar._storage.storage_path import LocalPath
from drawbar.train._config.checkpoint_modes import CheckpointUploadMode

_MAX_NAME_BYTES = 255  # limit of common filesystems
_MAX_PATH_BYTES = 4095
_STAGING_PATH_BYTES = 200  # upper limit for the part of a staging path below the run directory
_INTERNAL_DIRECTORIES = ("logs", "stacks", ".workers", ".uncommitted")


CheckpointUploadFn = Callable[[Checkpoint, str], Checkpoint]
"""User function that uploads a checkpoint under a name and returns the uploaded checkpoint.

It may upload to the run's storage or elsewhere. If it returns its argument unchanged, and that is a
local directory outside the run, Drawbar copies the directory.
"""


@dataclass(frozen=True)
class UploadOptions:
    """Options of `report()` that determine how and where the checkpoint is stored.

    Attributes:
        name: Name of the checkpoint; None for the default name.
        mode: Upload mode.
        delete_local: Whether to move the directory; None for the default of the mode.
        upload_fn: Function that replaces Drawbar's upload.
        background: Write to the directory that is in progress.
    """

    name: str | None
    mode: CheckpointUploadMode
    delete_local: bool | None
    upload_fn: CheckpointUploadFn | None
    background: BackgroundWrite | None = None

    @property
    def is_blocking(self) -> bool:
        """True if `report()` waits for the commit."""
        return self.mode is not CheckpointUploadMode.ASYNC

    def check(self) -> None:
        """Check the options.

        Raises:
            TypeError: The mode is not a `CheckpointUploadMode`, or the upload function cannot be
                called with a checkpoint and a name.
            ValueError: The name is not a valid directory name, or is reserved for files of the run.
        """
        _check_upload_mode(self.mode)
        if self.upload_fn is not None:
            _check_upload_fn(self.upload_fn)
        if self.name is not None:
            _check_name(self.name)


def _check_upload_mode(mode: object) -> None:
    if not isinstance(mode, CheckpointUploadMode):
        raise TypeError(
            f"checkpoint_upload_mode must be a CheckpointUploadMode, found {mode!r}. "
            "Use CheckpointUploadMode.ASYNC, for example."
        )


def _check_name(name: str) -> None:
    plain = name == Path(name).name and name[:1] not in (".", "") and name not in RUN_FILE_NAMES
    if not plain or "\0" in name or not is_encodable(name) or len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(
            f"checkpoint_dir_name={name!r} is not a valid name. Use a directory name without '/' "
            f"and without a leading '.', of at most {_MAX_NAME_BYTES} bytes in UTF-8. "
            f"Reserved names: {', '.join(RUN_FILE_NAMES)}"
        )


def _check_upload_fn(function: object) -> None:
    if not callable(function):
        raise TypeError(f"checkpoint_upload_fn must be a function, found {function!r}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some functions written in C have no signature
    try:
        signature.bind(None, "")
    except TypeError as error:
        raise TypeError(
            "checkpoint_upload_fn must accept two arguments (checkpoint, name), but "
            f"{getattr(function, '__name__', function)}{signature} does not: {error}"
        ) from None


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
