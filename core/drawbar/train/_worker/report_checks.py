"""What `report()` takes as a checkpoint: where it may lie, what names it may have, who uploads it.

All of this is looked at on the rank that reports, before its files are touched or anything is said.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drawbar.train._storage.contents import MANIFEST_FILE, DirectoryContents, FileEntry
from drawbar.train._storage.filesystem import RemotePath
from drawbar.train._storage.journal_file import JOURNAL_FILE
from drawbar.train._storage.manifest import read_manifest
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.run_files import RUN_FILE_NAMES, TRAINER_FILE

_MAX_NAME_BYTES = 255  # bytes, on the usual filesystems
_MAX_PATH_BYTES = 4095
_STAGING_PATH_BYTES = 200  # bytes that the names of the folders above take, in staging


def check_name(name: str) -> None:
    """Check the name that a checkpoint is to have in the run.

    Raises:
        ValueError: It is not that of a folder, or the run has something of that name.
    """
    plain = name == Path(name).name and name[:1] not in (".", "") and name not in RUN_FILE_NAMES
    if not plain or "\0" in name or not _is_utf8(name) or len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(
            f"checkpoint_dir_name={name!r} must be a plain folder name without a leading '.', "
            f"of no more than {_MAX_NAME_BYTES} bytes of UTF-8, and none of "
            f"{', '.join(RUN_FILE_NAMES)}"
        )


def check_upload_fn(function: object) -> None:
    """Check that a function can be called as `checkpoint_upload_fn` is.

    Raises:
        TypeError: It is not callable, or takes other arguments.
    """
    if not callable(function):
        raise TypeError(f"checkpoint_upload_fn must be a function, found {function!r}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some that are written in C have none
    try:
        signature.bind(None, "")
    except TypeError as error:
        raise TypeError(
            "checkpoint_upload_fn is called as function(checkpoint, name), but "
            f"{getattr(function, '__name__', function)}{signature} cannot be: {error}"
        ) from None


@dataclass(frozen=True)
class ReservedPaths:
    """Directories of a run on this node that must not be reported as a checkpoint.

    They are looked up once, since every checkpoint is compared with them.

    Attributes:
        forbidden: The run directory, its internal directories, and all parents, by device and
            inode.
        inside: The internal directories, which may be created later.
    """

    paths_by_inode: dict[tuple[int, int], str]
    subdirectories: tuple[str, ...]

    @staticmethod
    def from_run_directory(run: RunDirectory) -> ReservedPaths:
        """Look up the directories of a run."""
        roots = [RunDirectory(Path(os.path.realpath(place))) for place in run.list_local_paths()]
        around = [
            str(own)
            for run in roots
            for own in (run.local_path, *run.local_path.parents, run.staging.path)
        ]
        kept = ("logs", "stacks", ".workers", ".uncommitted")
        inside = [f"{run.local_path}/{name}" for run in roots for name in kept]
        return ReservedPaths(
            {found: own for own in (*inside, *around) if (found := _get_inode(own)) is not None},
            tuple(inside),
        )


def check_directory(directory: Path, reserved: ReservedPaths) -> None:
    """Check that a directory is neither internal to the run nor a parent of it.

    Raises:
        ValueError: It is the storage path, the run directory, a parent of them, or an internal
            directory of the run.
    """
    found = _get_inode(directory)
    own = None if found is None else reserved.paths_by_inode.get(found)
    # Filesystems reuse the inodes of deleted directories, so the path is looked up again.
    if own is not None and _get_inode(own) == found:
        raise _make_reserved_error(directory, own)
    real = f"{os.path.realpath(directory)}/"
    for own in reserved.subdirectories:
        if real.startswith(f"{own}/"):
            raise _make_reserved_error(directory, own)


def check_remote_directory(folder: RemotePath) -> None:
    """Check that a folder that is not mounted, directly in the run, is not one of the run's own.

    Raises:
        ValueError: It is.
    """
    if folder.name in RUN_FILE_NAMES:
        raise _make_reserved_error(folder, folder)


def _get_inode(place: str | Path) -> tuple[int, int] | None:
    try:
        # By device and inode: a link and a bind mount are other paths to the same place.
        found = os.stat(place)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _make_reserved_error(directory: Path | RemotePath, own: str | RemotePath) -> ValueError:
    return ValueError(
        f"report() was given {directory} as a checkpoint, but {own} holds what Drawbar "
        "keeps of the run, so it is neither copied nor moved; save into a folder of the "
        "checkpoint's own, such as checkpoint_dir() gives"
    )


def check_files(directory: Path, contents: DirectoryContents, run: RunDirectory) -> None:
    """Check the names of a checkpoint's files.

    Raises:
        ValueError: One is reserved, or cannot be written down, or not below the run; the message
            has the path.
    """
    # Looked at before anything is written: a name that is too long would fail in the middle of a
    # commit.
    room = _MAX_PATH_BYTES - _STAGING_PATH_BYTES - len(os.fsencode(run.local_path))
    for file in contents.files:
        if not file.path.isascii() and not _is_utf8(file.path):
            found = os.fsencode(directory / file.path)
            raise ValueError(f"no checkpoint can hold {found!r}: its name is not UTF-8; rename it")
        if len(file.path) * 4 > room and len(file.path.encode()) > room:
            raise ValueError(
                f"no checkpoint of the run in {run.local_path} can hold {directory / file.path}: "
                f"its path there would be longer than {_MAX_PATH_BYTES} bytes"
            )
    if (
        contents.reserved_files and read_manifest(directory) is None
    ):  # with it, a copy of a checkpoint
        reserved = directory / contents.reserved_files[0]
        raise ValueError(
            f"the name of {reserved} is reserved: Drawbar keeps a file of its own by that name in "
            "each checkpoint; rename it"
        )


def can_move(directory: Path, files: Sequence[FileEntry], run: RunDirectory) -> bool:
    """Whether a directory that was handed over may be moved and deleted.

    What is committed, belongs to another run, or is where the process or its user is at home, is
    copied and stays.
    """
    place = os.path.realpath(directory)
    for home in (os.getcwd(), os.path.realpath(os.path.expanduser("~"))):
        if f"{home}/".startswith(f"{place.rstrip('/')}/"):
            return False
    while place != os.path.dirname(place):
        if os.path.exists(f"{place}/{MANIFEST_FILE}"):
            return False
        if _is_run_directory(place):
            return os.path.samefile(place, run.local_path)
        place = os.path.dirname(place)
    held = (file.path for file in files if file.path.endswith(f"/{run.journal_path.name}"))
    return not any(_is_run_directory(str((directory / path).parent)) for path in held)


def _is_run_directory(place: str) -> bool:
    # A user may have a file named like the journal.
    return all(os.path.exists(f"{place}/{name}") for name in (JOURNAL_FILE, TRAINER_FILE))


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
