"""`LiveGoodput`: goodput of a run in progress, without reading its whole journal each time."""

from __future__ import annotations

import time

from drawbar.train._history.goodput import Goodput
from drawbar.train._history.goodput_meter import GoodputMeter
from drawbar.train._history.journal import decode_readable_events
from drawbar.train._history.run_history import RunHistory
from drawbar.train._history.stored_reports import StoredReports
from drawbar.train._storage.journal_file import strip_torn_line
from drawbar.train._storage.manifest import read_file_or_none
from drawbar.train._storage.run_directory import RunDirectory


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
            return RunHistory.read(self._directory).compute_goodput(is_active=is_active)
        lines = strip_torn_line(data)
        self._offset += len(lines)
        for event in decode_readable_events(lines)[0]:
            self._meter.apply(event)
        return self._meter.compute(is_active=is_active, now=time.time() if is_active else None)
