"""Runs by name, by path, and all those of a storage."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from drawbar.train._history.record import RunRecord
from drawbar.train._settings.run_config import DEFAULT_STORAGE_PATH
from drawbar.train._storage.contents import is_folder
from drawbar.train._storage.journal_file import JOURNAL
from drawbar.train._storage.remote_folder import AnyFileSystem, Folder, locate
from drawbar.train._storage.run_directory import directory_at

_NEAREST = 3


def find_run(
    path_or_name: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
) -> RunRecord:
    """Read a run from its directory: of one that goes on, is over, was cut off, or is damaged.

    Args:
        path_or_name: The run's directory, its URI, or its name in the default storage path.
        storage_filesystem: The filesystem that the path lies on, as for `RunConfig`.

    Raises:
        LookupError: There is no such run; the message has the nearest names there.
        OSError: The storage refuses, or does not answer.
        ImportError, ValueError, TypeError: The path and the filesystem name no storage.
    """
    given = os.fspath(path_or_name)
    is_name = "/" not in given and storage_filesystem is None and given not in ("", ".", "..")
    default = Path(DEFAULT_STORAGE_PATH).expanduser()
    if is_name and not (default / given).exists() and (Path(given) / JOURNAL).exists():
        is_name = False  # a folder of the working directory
    place = default / given if is_name else locate(given, storage_filesystem)
    try:
        return RunRecord.read(directory_at(place))
    except FileNotFoundError:
        storage = default if is_name else place.parent
        raise LookupError(_no_run(place, storage)) from None


def _no_run(place: Path | Folder, storage: Path | Folder) -> str:
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in _folders(storage) if name != place.name]
    nearest = difflib.get_close_matches(place.name, names, n=_NEAREST, cutoff=0.5)
    if nearest:
        return f"no run {place.name!r} in {storage}; near to that: {', '.join(nearest)}"
    there = f"{len(names)} other folders are there" if names else "it is empty or not there"
    return f"no run {place.name!r} in {storage}; {there}"


def list_runs(
    storage_path: str | os.PathLike[str] = DEFAULT_STORAGE_PATH,
    storage_filesystem: AnyFileSystem | None = None,
) -> Iterator[RunRecord]:
    """Read all runs that lie directly in a storage path, in the order of their names.

    Args:
        storage_path: As `RunConfig.storage_path`.
        storage_filesystem: The filesystem that it lies on, as for `RunConfig`.

    Raises:
        FileNotFoundError: The storage path is not there.
        OSError: The storage refuses, or does not answer.
        ImportError, ValueError, TypeError: The path and the filesystem name no storage.
    """
    storage = locate(storage_path, storage_filesystem)
    if not storage.exists():
        raise FileNotFoundError(f"{storage} is not there")
    for name in _folders(storage):
        place = storage / name
        if isinstance(place, Folder) or _may_hold_run(place):
            try:
                yield RunRecord.read(directory_at(place))
            except FileNotFoundError:
                continue


def _may_hold_run(place: Path) -> bool:
    """Whether there is a journal, or whether that cannot be told: the run is named then too."""
    try:
        os.lstat(place / JOURNAL)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _folders(storage: Path | Folder) -> list[str]:
    if isinstance(storage, Folder):
        return storage.folders()
    found = [entry.name for entry in os.scandir(storage) if is_folder(entry)]
    return sorted(name for name in found if not name.startswith("."))
