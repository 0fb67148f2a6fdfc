"""Find runs by name, path, or storage."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from drawbar.train._config.run_config import DEFAULT_STORAGE_PATH
from drawbar.train._history.run_history import RunHistory
from drawbar.train._history.run_record import RunRecord
from drawbar.train._storage.contents import is_directory
from drawbar.train._storage.filesystem import AnyFileSystem, resolve_path
from drawbar.train._storage.journal_file import JOURNAL_FILE
from drawbar.train._storage.remote_path import RemotePath
from drawbar.train._storage.run_directory import make_run_directory

_MAX_SUGGESTIONS = 3
_MAX_DEPTH = 4  # of directories to search for runs, because a storage may also contain datasets


def find_run(
    path_or_name: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
) -> RunRecord:
    """Read a run from its directory, whether it is in progress, ended, interrupted, or damaged.

    Args:
        path_or_name: The run's directory, its URI, or its name in the default storage path, such as
            `run` or `experiment/run`.
        storage_filesystem: Filesystem of the path, as for `RunConfig`.

    Returns:
        The run.

    Raises:
        LookupError: The run does not exist. The message has the most similar names in the storage.
        OSError: The storage cannot be read.
        ImportError, ValueError, TypeError: The path and the filesystem do not specify a storage.

    Example:
        Print the status of a run::

            run = runs.find_run("/shared/runs/experiment")
            print(run.status, run.damage)
    """
    text = os.fspath(path_or_name)
    is_name = "/" not in text and storage_filesystem is None and text not in ("", ".", "..")
    default = Path(DEFAULT_STORAGE_PATH).expanduser()
    if is_name and not (default / text).exists() and (Path(text) / JOURNAL_FILE).exists():
        is_name = False  # a directory in the working directory
    if "/" in text and storage_filesystem is None:
        # The name of a run can have parent directories. An existing relative path takes precedence.
        is_name = not os.path.exists(text) and (default / text / JOURNAL_FILE).exists()
    path = default / text if is_name else resolve_path(text, storage_filesystem)
    try:
        return read_record(path)
    except FileNotFoundError:
        storage = default if is_name else path.parent
        raise LookupError(_describe_missing_run(path, storage)) from None


def read_record(path: Path | RemotePath, name: str = "") -> RunRecord:
    """Read a run. `name` is its name in the storage path that lists it.

    Raises:
        FileNotFoundError: There is no run.
        OSError: The storage cannot be read.
    """
    directory = make_run_directory(path)
    history, damage = RunHistory.read_readable(directory)
    return RunRecord(directory, history, damage, name)


def _describe_missing_run(path: Path | RemotePath, storage: Path | RemotePath) -> str:
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in _list_run_directories(storage) if name != path.name]
    similar = difflib.get_close_matches(path.name, names, n=_MAX_SUGGESTIONS, cutoff=0.5)
    if similar:
        return f"There is no run {path.name!r} in {storage}. Similar names: {', '.join(similar)}."
    others = f"has {len(names)} other directories" if names else "is empty or does not exist"
    return f"There is no run {path.name!r} in {storage}. This storage path {others}."


def list_runs(
    storage_path: str | os.PathLike[str] = DEFAULT_STORAGE_PATH,
    storage_filesystem: AnyFileSystem | None = None,
) -> Iterator[RunRecord]:
    """Read all runs of a storage path, in the order of their names.

    Runs whose names have directories, such as `RunConfig(name="experiment/run")`, are included.
    Directories behind symbolic links are not searched for them.

    Args:
        storage_path: Path or URI, as for `RunConfig.storage_path`.
        storage_filesystem: Filesystem of the storage path, as for `RunConfig`.

    Yields:
        The runs.

    Raises:
        FileNotFoundError: The storage path does not exist.
        OSError: The storage cannot be read.
        ImportError, ValueError, TypeError: The path and the filesystem do not specify a storage.

    Example:
        Print all failed runs::

            for run in runs.list_runs("/shared/runs"):
                if run.status == "failed":
                    print(run.name, run.error)
    """
    storage = resolve_path(storage_path, storage_filesystem)
    if not storage.exists():
        raise FileNotFoundError(f"Storage path {storage} does not exist.")
    yield from iter_run_records(storage, read_record)


def iter_run_records(
    storage: Path | RemotePath,
    read: Callable[[Path | RemotePath, str], RunRecord],
    prefix: str = "",
    depth: int = 1,
) -> Iterator[RunRecord]:
    """Yield the runs of a directory, in the order of their names.

    Args:
        storage: The directory.
        read: Function that reads the run in a directory with a name, as `read_record` does.
        prefix: Name of the directory in the storage path, with a "/" at its end.
        depth: Number of directories from the storage path to the runs.
    """
    for name in _list_run_directories(storage):
        path = storage / name
        run = _read_run(path, prefix + name, read)
        if run is not None:
            yield run
        elif depth < _MAX_DEPTH and not (isinstance(path, Path) and path.is_symlink()):
            # A directory that is unreadable or was just deleted must not hide the others.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                yield from iter_run_records(path, read, f"{prefix}{name}/", depth + 1)


def _read_run(
    path: Path | RemotePath, name: str, read: Callable[[Path | RemotePath, str], RunRecord]
) -> RunRecord | None:
    if isinstance(path, Path) and not _can_be_run(path):
        return None
    try:
        return read(path, name)
    except FileNotFoundError:
        return None


def _can_be_run(path: Path) -> bool:
    """Return True if a directory has a journal, or cannot be searched, which is reported later."""
    try:
        os.lstat(path / JOURNAL_FILE)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _list_run_directories(storage: Path | RemotePath) -> list[str]:
    if isinstance(storage, RemotePath):
        return storage.list_directories()
    names = [entry.name for entry in os.scandir(storage) if is_directory(entry)]
    return sorted(name for name in names if not name.startswith("."))
