"""`RunCatalog`: the runs of several storage paths, read again only after changes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from drawbar.train._config.run_config import DEFAULT_STORAGE_PATH
from drawbar.train._errors import CheckpointError
from drawbar.train._history.find_runs import find_run, iter_run_records, read_record
from drawbar.train._history.run_record import RunRecord
from drawbar.train._storage.filesystem import resolve_path
from drawbar.train._storage.journal_file import JOURNAL_FILE
from drawbar.train._storage.remote_path import RemotePath
from drawbar.train._storage.report_files import REPORTS_DIRECTORY

_REMOTE_SECONDS = 10.0
"""Time for which a run in remote storage is not read again."""
_MAX_LOAD = 0.2
"""Maximum part of the time in which a run in progress is read."""

ACTIVE_STATUSES = ("starting", "running", "restarting")

Fingerprint = tuple[object, ...]


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
        Print the status of all runs each time the user presses Enter::

            catalog = runs.RunCatalog(["/shared/runs"])
            while True:
                print([(run.name, run.status) for run in catalog.list_runs()])
                input()
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]] = ()) -> None:
        self.paths = [os.fspath(path) for path in paths] or [DEFAULT_STORAGE_PATH]
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
        elif "/" not in path:
            yield find_run(path)
        else:
            raise FileNotFoundError(f"Storage path {root} does not exist.")

    def _read(self, path: Path | RemotePath, name: str) -> RunRecord:
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


def _is_run(root: Path | RemotePath) -> bool:
    if isinstance(root, Path):
        return os.path.lexists(root / JOURNAL_FILE)
    return root.get_size(JOURNAL_FILE) is not None


def _get_fingerprint(path: Path | RemotePath) -> Fingerprint:
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
