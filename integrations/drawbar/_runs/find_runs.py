"""Find runs by name, path, or storage, and list them again after changes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from drawbar._history.run_history import RunHistory
from drawbar._history.run_locations import MAX_DEPTH, can_be_run_name, locate_run
from drawbar._process.errors import CheckpointError
from drawbar._runs.run_record import RunRecord
from drawbar._storage.default_storage import get_default_storage_path
from drawbar._storage.filesystem import AnyFileSystem, resolve_path
from drawbar._storage.journal_file import JOURNAL_FILE
from drawbar._storage.remote_path import RemotePath
from drawbar._storage.report_files import REPORTS_DIRECTORY
from drawbar._storage.run_directory import make_run_directory
from drawbar._storage.storage_path import LocalPath, StoragePath

_REMOTE_SECONDS = 10.0
"""Time for which a run in remote storage is not read again."""
_MAX_LOAD = 0.2
"""Maximum part of the time in which a run in progress is read."""

ACTIVE_STATUSES = ("starting", "running", "restarting")

Fingerprint = tuple[object, ...]


def find_run(
    path_or_name: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
) -> RunRecord:
    """Read a run from its directory, whether it is in progress, ended, interrupted, or damaged.

    Args:
        path_or_name: The run's directory, its URI, or its name in the default storage path, such as
            `run` or `experiment/run`. See `get_default_storage_path`.
        storage_filesystem: Filesystem of the path, as for `RunConfig`.

    Returns:
        The run.

    Raises:
        LookupError: The run does not exist. The message has the most similar names in the storage.
        OSError: The storage cannot be read.
        ImportError, ValueError, TypeError: The path and the filesystem do not specify a storage.

    Example:
        Print the status of a run:

            run = runs.find_run("/shared/runs/experiment")
            print(run.status, run.damage)
    """
    location = locate_run(path_or_name, storage_filesystem)
    try:
        return read_record(location.path)
    except FileNotFoundError:
        raise LookupError(location.describe_missing_run()) from None


def read_record(path: StoragePath, name: str = "") -> RunRecord:
    """Read a run. `name` is its name in the storage path that lists it.

    Raises:
        FileNotFoundError: There is no run.
        OSError: The storage cannot be read.
    """
    directory = make_run_directory(path)
    history, damage = RunHistory.read_readable(directory)
    return RunRecord(directory, history, damage, name)


def list_runs(
    storage_path: str | os.PathLike[str] | None = None,
    storage_filesystem: AnyFileSystem | None = None,
) -> Iterator[RunRecord]:
    """Read all runs of a storage path, in the order of their names.

    Runs whose names have directories, such as `RunConfig(name="experiment/run")`, are included.
    Directories behind symbolic links are not searched for them.

    Args:
        storage_path: Path or URI, as for `RunConfig.storage_path`. Default: the default storage
            path, which has no runs if it does not exist.
        storage_filesystem: Filesystem of the storage path, as for `RunConfig`.

    Yields:
        The runs.

    Raises:
        FileNotFoundError: The storage path does not exist.
        OSError: The storage cannot be read.
        ImportError, ValueError, TypeError: The path and the filesystem do not specify a storage.

    Example:
        Print all failed runs:

            for run in runs.list_runs("/shared/runs"):
                if run.status == "failed":
                    print(run.name, run.error)
    """
    is_default = storage_path is None
    storage = resolve_path(storage_path or get_default_storage_path(), storage_filesystem)
    if not storage.exists():
        if is_default:
            return
        raise FileNotFoundError(f"Storage path {storage} does not exist.")
    yield from iter_run_records(storage, read_record)


def iter_run_records(
    storage: StoragePath,
    read: Callable[[StoragePath, str], RunRecord],
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
    for name in storage.list_directories():
        path = storage / name
        run = _read_run(path, prefix + name, read)
        if run is not None:
            yield run
        elif depth < MAX_DEPTH and not (isinstance(path, LocalPath) and path.is_symlink()):
            # A directory that is unreadable or was just deleted must not hide the others.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                yield from iter_run_records(path, read, f"{prefix}{name}/", depth + 1)


def _read_run(
    path: StoragePath, name: str, read: Callable[[StoragePath, str], RunRecord]
) -> RunRecord | None:
    if isinstance(path, LocalPath) and not _can_be_run(path):
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


@dataclass
class _Entry:
    record: RunRecord
    fingerprint: Fingerprint
    read_time: float
    read_seconds: float


class RunCatalog:
    """The runs of storage paths and run directories, without Ray.

    A run is read again only if its journal or its reports have changed: a local run when the sizes
    or times of these files differ, a run in remote storage after 10 s. One catalog can be used by
    several threads.

    Args:
        paths: Storage paths, run directories, URIs, or names of runs in the default storage path.
            Default: the default storage path.

    Attributes:
        errors: Reasons for which paths could not be read by the last `list_runs`.

    Example:
        Print the status of all runs each time the user presses Enter:

            catalog = runs.RunCatalog(["/shared/runs"])
            while True:
                print([(run.name, run.status) for run in catalog.list_runs()])
                input()
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]] = ()) -> None:
        self.paths = [os.fspath(path) for path in paths]
        self._is_default = not self.paths
        self.paths = self.paths or [get_default_storage_path()]
        self.errors: list[str] = []
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._lock = threading.Lock()

    def list_runs(self) -> list[RunRecord]:
        """Return all runs, in the order of the paths and of their names.

        Paths that cannot be read are listed in `errors`.

        Returns:
            The runs.
        """
        with self._lock:
            errors: list[str] = []
            found: dict[str, RunRecord] = {}
            for path in self.paths:
                try:
                    for record in self._iter_path(path):
                        found.setdefault(record.path, record)
                except (OSError, LookupError, ImportError, ValueError, TypeError) as error:
                    errors.append(f"{path}: {_describe_error(error)}")
                except CheckpointError as error:
                    errors.append(f"{path}: {error}")
            self._entries = {
                key: entry for key, entry in self._entries.items() if entry.record.path in found
            }
            self.errors = errors
            return list(found.values())

    def refresh(self, record: RunRecord) -> RunRecord:
        """Return a run as it is now.

        Args:
            record: The run, as it was read before.

        Returns:
            The same object if the run has not changed.

        Raises:
            FileNotFoundError: The run was deleted.
            OSError: The storage cannot be read.
        """
        with self._lock:
            return self._read(resolve_path(record.path), record.name)

    def _iter_path(self, path: str) -> Iterable[RunRecord]:
        root = resolve_path(path)
        if _is_run(root):
            yield self._read(root, "")
        elif root.exists():
            yield from iter_run_records(root, self._read)
        elif can_be_run_name(path):
            yield find_run(path)
        elif not self._is_default:  # the first run creates the default one
            raise FileNotFoundError(f"Storage path {root} does not exist.")

    def _read(self, path: StoragePath, name: str) -> RunRecord:
        key = str(path), name or path.name
        fingerprint = _get_fingerprint(path)
        entry = self._entries.get(key)
        now = time.monotonic()
        if entry is not None:
            is_recent = now - entry.read_time < entry.read_seconds / _MAX_LOAD
            if entry.fingerprint == fingerprint or (
                is_recent and entry.record.status in ACTIVE_STATUSES
            ):
                return entry.record
        record = read_record(path, name)
        end = time.monotonic()
        self._entries[key] = _Entry(record, fingerprint, end, end - now)
        return record


def _is_run(root: StoragePath) -> bool:
    if isinstance(root, LocalPath):
        return os.path.lexists(root / JOURNAL_FILE)
    return root.get_size(JOURNAL_FILE) is not None


def _get_fingerprint(path: StoragePath) -> Fingerprint:
    """Return a value that changes if the journal or the reports of a run change."""
    if isinstance(path, RemotePath):
        return (int(time.monotonic() / _REMOTE_SECONDS),)
    values: list[object] = [_get_file_state(path / JOURNAL_FILE)]
    try:
        with os.scandir(path / REPORTS_DIRECTORY) as entries:
            for entry in entries:
                values.append(entry.name)
                if entry.name.endswith(".jsonl"):  # an open segment, which grows
                    values.append(_get_file_state(entry.path))
    except OSError:
        pass
    return tuple(values)


def _get_file_state(path: str | Path) -> Fingerprint:
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        return (type(error).__name__,)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _describe_error(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
