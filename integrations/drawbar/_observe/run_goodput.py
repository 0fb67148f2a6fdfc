"""Compute the goodput of a stored run, and of a run in progress."""

from __future__ import annotations

import time

from drawbar._history.run_history import RunHistory
from drawbar._observe.goodput import Goodput
from drawbar._observe.goodput_meter import GoodputMeter
from drawbar._records.journal import decode_readable_events
from drawbar._records.stored_reports import StoredReports
from drawbar._storage.journal_file import strip_torn_line
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.storage_path import read_file_or_none


def compute_goodput(history: RunHistory, *, is_active: bool) -> Goodput:
    """Return the goodput until the end of the run, or until now if a process hosts it."""
    meter = GoodputMeter(history.reports.get_last_time)
    for event in history.events:
        meter.apply(event)
    return meter.compute(now=time.time() if is_active else None)


class LiveGoodput:
    """Goodput of one run. Each call of `read` reads only new events.

    Args:
        directory: Run directory.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._meter = GoodputMeter(StoredReports(directory.run_files).get_last_time)
        self._offset = 0

    def read(self, *, is_active: bool) -> Goodput:
        """Return the goodput until the end of the run, or until now if a process hosts it."""
        journal = self._directory.journal_path
        data = read_file_or_none(journal.parent, journal.name, self._offset)
        if data is None:  # the run is on another node, or has ended and is in remote storage
            return compute_goodput(RunHistory.read(self._directory), is_active=is_active)
        lines = strip_torn_line(data)
        self._offset += len(lines)
        for event in decode_readable_events(lines)[0]:
            self._meter.apply(event)
        return self._meter.compute(now=time.time() if is_active else None)
