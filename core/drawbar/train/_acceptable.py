"""What `report()` takes as a checkpoint: where it may lie, and what names it may have in it.

All of this is looked at on the rank that reports, before its files are touched or anything is said.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from drawbar.train import _files
from drawbar.train._filesystem import Folder
from drawbar.train._manifest import read_manifest
from drawbar.train._messages import FileEntry
from drawbar.train._storage import OWN_NAMES, RunDirectory

_LONGEST_NAME = 255  # bytes, on the usual filesystems
_LONGEST_PATH = 4095
_OF_A_STAGE = 200  # bytes that the names of the folders above take, in staging


def check_name(name: str) -> None:
    """Check the name that a checkpoint is to have in the run.

    Raises:
        ValueError: It is not that of a folder, or the run has something of that name.
    """
    plain = name == Path(name).name and name[:1] not in (".", "") and name not in OWN_NAMES
    if not plain or "\0" in name or not _is_text(name) or len(name.encode()) > _LONGEST_NAME:
        raise ValueError(
            f"checkpoint_dir_name={name!r} must be a plain folder name without a leading '.', "
            f"of no more than {_LONGEST_NAME} bytes of UTF-8, and none of {', '.join(OWN_NAMES)}"
        )


def check_place(directory: Path | Folder, run: RunDirectory) -> None:
    """Check that a directory is not the run's own one, nor one around it.

    Of a folder that is not mounted it is known that it lies directly in the run.

    Raises:
        ValueError: It is the storage path, the run's directory, one that they lie in, or one of the
            run's own folders.
    """
    if isinstance(directory, Folder):
        if directory.name in OWN_NAMES:
            raise _refused(directory, directory)
        return
    found = os.stat(directory)
    real = os.path.join(os.path.realpath(directory), "")
    for place in map(os.path.realpath, run.local_places()):
        root = RunDirectory(Path(place))
        inside = (root.path / name for name in ("logs", "stacks", ".workers", ".uncommitted"))
        for own in (root.path, *root.path.parents, root.staging):
            if _is_at(own, found):
                raise _refused(directory, own)
        for own in inside:
            if _is_at(own, found) or real.startswith(os.path.join(own, "")):
                raise _refused(directory, own)


def _is_at(place: Path, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(place), found)
    except OSError:
        return False


def _refused(directory: Path | Folder, own: Path | Folder) -> ValueError:
    return ValueError(
        f"report() was given {directory} as a checkpoint, but {own} holds what Drawbar "
        "keeps of the run, so it is neither copied nor moved; save into a folder of the "
        "checkpoint's own, such as checkpoint_dir() gives"
    )


def check_files(directory: Path, files: Sequence[FileEntry], run: RunDirectory) -> None:
    """Check the names of a checkpoint's files.

    Raises:
        ValueError: One is reserved, or cannot be written down, or not below the run; the message
            has the path.
    """
    room = _LONGEST_PATH - _OF_A_STAGE - len(os.fsencode(run.path))
    for file in files:
        if not file.path.isascii() and not _is_text(file.path):
            found = os.fsencode(directory / file.path)
            raise ValueError(f"no checkpoint can hold {found!r}: its name is not UTF-8; rename it")
        if len(file.path) * 4 > room and len(file.path.encode()) > room:
            raise ValueError(
                f"no checkpoint of the run in {run.path} can hold {directory / file.path}: "
                f"its path there would be longer than {_LONGEST_PATH} bytes"
            )
    own = sorted(name for name in os.listdir(directory) if _files.is_own(name))
    if own and read_manifest(directory) is None:  # with it, this is a copy of a checkpoint
        raise ValueError(
            f"the name of {directory / own[0]} is reserved: Drawbar keeps a file of its own by "
            "that name in each checkpoint; rename it"
        )


def may_be_given_away(directory: Path, files: Sequence[FileEntry], run: RunDirectory) -> bool:
    """Whether a directory that was handed over may be moved and deleted.

    What is committed, or belongs to another run, is copied and stays.
    """
    real = Path(os.path.realpath(directory))
    for place in (real, *real.parents):
        if (place / _files.MANIFEST).exists():
            return False
        if _holds_run(place):
            return place.samefile(run.path)
    held = (file.path for file in files if file.path.endswith(f"/{run.journal.name}"))
    return not any(_holds_run((directory / path).parent) for path in held)


def _holds_run(place: Path) -> bool:
    run = RunDirectory(place)
    return run.journal.exists() and run.staging.is_dir()


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
