"""Runs by name, by path, and all those of a storage."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from drawbar.train._config.run_config import DEFAULT_STORAGE_PATH
from drawbar.train._history.run_record import RunRecord
from drawbar.train._storage.contents import is_directory
from drawbar.train._storage.filesystem import AnyFileSystem, RemotePath, resolve_path
from drawbar.train._storage.journal_file import JOURNAL_FILE
from drawbar.train._storage.run_directory import make_run_directory

_MAX_SUGGESTIONS = 3
_MAX_DEPTH = 4  # of folders that are searched for runs: a storage path may hold data sets too


def find_run(
    path_or_name: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
) -> RunRecord:
    """Read a run from its directory, whether it is in progress, ended, interrupted, or damaged.

    Args:
        path_or_name: The run's directory, its URI, or its name in the default storage path, such as
            `run` or `experiment/run`.
        storage_filesystem: Filesystem of the path, as for `RunConfig`.

    Raises:
        LookupError: The run does not exist. The message has the most similar names in the storage.
        OSError: The storage cannot be read.
        ImportError, ValueError, TypeError: The path and the filesystem do not specify a storage.
    """
    given = os.fspath(path_or_name)
    is_name = "/" not in given and storage_filesystem is None and given not in ("", ".", "..")
    default = Path(DEFAULT_STORAGE_PATH).expanduser()
    if is_name and not (default / given).exists() and (Path(given) / JOURNAL_FILE).exists():
        is_name = False  # a folder of the working directory
    if "/" in given and storage_filesystem is None:
        # The name of a run may have folders. A path from the working directory wins.
        is_name = not os.path.exists(given) and (default / given / JOURNAL_FILE).exists()
    place = default / given if is_name else resolve_path(given, storage_filesystem)
    try:
        return RunRecord.from_directory(make_run_directory(place))
    except FileNotFoundError:
        storage = default if is_name else place.parent
        raise LookupError(_describe_missing_run(place, storage)) from None


def _describe_missing_run(place: Path | RemotePath, storage: Path | RemotePath) -> str:
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in _list_run_directories(storage) if name != place.name]
    nearest = difflib.get_close_matches(place.name, names, n=_MAX_SUGGESTIONS, cutoff=0.5)
    if nearest:
        return f"no run {place.name!r} in {storage}; near to that: {', '.join(nearest)}"
    there = f"{len(names)} other folders are there" if names else "it is empty or not there"
    return f"no run {place.name!r} in {storage}; {there}"


def list_runs(
    storage_path: str | os.PathLike[str] = DEFAULT_STORAGE_PATH,
    storage_filesystem: AnyFileSystem | None = None,
) -> Iterator[RunRecord]:
    """Read all runs of a storage path, in the order of their names.

    Runs whose names have folders, such as `RunConfig(name="experiment/run")`, are included.
    Directories behind symbolic links are not searched for them.

    Args:
        storage_path: As `RunConfig.storage_path`.
        storage_filesystem: Filesystem of the storage path, as for `RunConfig`.

    Raises:
        FileNotFoundError: The storage path does not exist.
        OSError: The storage cannot be read.
        ImportError, ValueError, TypeError: The path and the filesystem do not specify a storage.
    """
    storage = resolve_path(storage_path, storage_filesystem)
    if not storage.exists():
        raise FileNotFoundError(f"{storage} is not there")
    yield from _runs_in(storage, prefix="", depth=1)


def _runs_in(storage: Path | RemotePath, prefix: str, depth: int) -> Iterator[RunRecord]:
    for name in _list_run_directories(storage):
        place = storage / name
        run = _read_run(place, prefix + name)
        if run is not None:
            yield run
        elif depth < _MAX_DEPTH and not (isinstance(place, Path) and place.is_symlink()):
            # A folder that this user cannot read, or that was just deleted, hides no other one.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                yield from _runs_in(place, f"{prefix}{name}/", depth + 1)


def _read_run(place: Path | RemotePath, name: str) -> RunRecord | None:
    if isinstance(place, Path) and not _can_be_run(place):
        return None
    try:
        return RunRecord.from_directory(make_run_directory(place), name)
    except FileNotFoundError:
        return None


def _can_be_run(place: Path) -> bool:
    """Return whether a directory has a journal, or cannot be searched, which is reported too."""
    try:
        os.lstat(place / JOURNAL_FILE)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _list_run_directories(storage: Path | RemotePath) -> list[str]:
    if isinstance(storage, RemotePath):
        return storage.list_directories()
    found = [entry.name for entry in os.scandir(storage) if is_directory(entry)]
    return sorted(name for name in found if not name.startswith("."))
