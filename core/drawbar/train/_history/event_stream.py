"""Store each event, and deliver it to the run state and the watchers, in order."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from drawbar.train._history.events import Event, JournalEntry, ReportsReceived
from drawbar.train._history.journal import Journal
from drawbar.train._history.report_log import ReportLog
from drawbar.train._history.timeline import RunState

Emit = Callable[[Event], None]

_logger = logging.getLogger(__name__)


class Watcher(Protocol):
    """Observer of a run, such as the console, callbacks, or a handle in another process."""

    def on_event(self, event: Event) -> None:
        """Handle the next event without blocking."""
        ...

    def close(self) -> None:
        """Show buffered output. No more events follow."""
        ...


class EventStream:
    """Deliver each event once and in order, first to the files of the run, then to all others.

    Args:
        journal: Stores events of type `JournalEntry`.
        reports: Stores reports.
        state: Current state of the run.
        watchers: Observers. Their exceptions are logged and do not affect the run.
    """

    def __init__(
        self,
        journal: Journal,
        reports: ReportLog,
        state: RunState,
        watchers: Sequence[Watcher],
    ) -> None:
        self._journal = journal
        self._reports = reports
        self._state = state
        self._watchers = watchers
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Deliver an event. When this returns, it is stored.

        Raises:
            OSError: The event cannot be written. No watcher receives it.
        """
        if isinstance(event, JournalEntry):
            self._journal.append(event)
        elif isinstance(event, ReportsReceived):
            self._reports.append(event)
        # The files and the watchers are outside the lock: a slow disk must not block readers of
        # the state.
        with self._lock:
            self._state.apply(event)
        for watcher in self._watchers:
            try:
                watcher.on_event(event)
            except Exception:
                _logger.warning(
                    "%s failed to handle the event %s. The run continues.",
                    type(watcher).__name__,
                    type(event).__name__,
                    exc_info=True,
                )

    def copy_state(self) -> RunState:
        """Return a copy of the state of the run. Can be called from any thread."""
        with self._lock:
            # A copy, because this thread changes its own while the caller reads.
            return copy.deepcopy(self._state)
