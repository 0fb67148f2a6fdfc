"""`RunIndex`: the runs that a server shows, by id."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from drawbar.train.runs import RunCatalog, RunRecord

ACTIVE_STATUSES = ("starting", "running", "restarting")

_REFRESH_PERIOD_S = 1.0
"""Time in seconds for which a list of runs is reused."""

_versions = itertools.count()
_process_id = secrets.token_hex(3)
"""A server that was started again must not repeat versions."""


def get_run_id(path: str) -> str:
    """Return the identifier of a run in URLs, which contains no characters of its path."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


@dataclass
class IndexedRun:
    """A version of a run, and the values that were computed from it."""

    id: str
    record: RunRecord
    status: str
    version: str
    as_of: float
    values: dict[str, Any] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def is_active(self) -> bool:
        """True if the run is in progress."""
        return self.status in ACTIVE_STATUSES

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events of the run."""
        result: list[dict[str, Any]] = self.compute_once("events", self.record.list_events)
        return result

    def compute_once(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return a value that is computed once for each version of the run."""
        with self.lock:
            if key not in self.values:
                self.values[key] = compute()
            return self.values[key]


class RunIndex:
    """Runs of storage paths and run directories, read again when they change.

    Args:
        paths: Storage paths, run directories, URIs, or names of runs.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._catalog = RunCatalog(paths)
        self._runs: dict[str, IndexedRun] = {}
        self._time = 0.0
        self._lock = threading.Lock()

    @property
    def paths(self) -> list[str]:
        """Paths that the server shows."""
        return list(self._catalog.paths)

    @property
    def errors(self) -> list[str]:
        """Reasons for which paths could not be read."""
        return list(self._catalog.errors)

    @property
    def time(self) -> float:
        """Time at which the runs were read last, in seconds since the epoch."""
        return self._time

    def refresh(self) -> dict[str, IndexedRun]:
        """Return the runs by id, newest first. They are read at most once per second."""
        with self._lock:
            now = time.time()
            if 0 <= now - self._time < _REFRESH_PERIOD_S:
                return self._runs
            runs = [self._reuse(record, now) for record in self._catalog.list_runs()]
            runs.sort(key=lambda run: run.record.start_time or 0.0, reverse=True)
            self._runs, self._time = {run.id: run for run in runs}, time.time()
            return self._runs

    def _reuse(self, record: RunRecord, now: float) -> IndexedRun:
        run_id, status = get_run_id(record.path), record.status
        known = self._runs.get(run_id)
        if known is not None and known.record is record and known.status == status:
            known.as_of = now
            return known
        return IndexedRun(run_id, record, status, f"{_process_id}-{next(_versions)}", now)

    def get_version(self) -> str:
        """Return a text that changes when a run changes, appears, or disappears."""
        versions = [run.version for run in self.refresh().values()]
        return hashlib.sha256(repr((versions, self.errors)).encode()).hexdigest()[:16]
