"""Store each event, and deliver it to the run state and the watchers, in order.

An `EventBuffer` is the watcher for clients in other processes.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Protocol

from drawbar._records import events, live_events
from drawbar._records.journal import Journal
from drawbar._records.live_events import Event
from drawbar._records.report_log import ReportLog
from drawbar._records.timeline import RunState

Emit = Callable[[Event], None]


_logger = logging.getLogger("drawbar.train")


class Watcher(Protocol):
    """Observer of a run, such as the console, callbacks, or a handle in another process.

    The console and the recorders of measurements are watchers. Callbacks of users receive the
    events with `UserCallback.on_event`.
    """

    def on_event(self, event: Event) -> None:
        """Handle the next event without blocking. Called in the thread that emits it."""
        ...

    def close(self) -> None:
        """Write or show buffered events, before the files of the run are uploaded."""
        ...


class EventStream:
    """Deliver each event once and in order, first to the files of the run, then to the watchers.

    Exceptions of watchers are logged and do not affect the run.

    Args:
        journal: Stores events of type `JournalEntry`.
        reports: Stores reports.
        state: Current state of the run.
    """

    def __init__(self, journal: Journal, reports: ReportLog, state: RunState) -> None:
        self._journal = journal
        self._reports = reports
        self._state = state
        self._watchers: list[Watcher] = []
        self._lock = threading.Lock()

    def add(self, watcher: Watcher) -> None:
        """Deliver events to another watcher from now on."""
        self._watchers.append(watcher)

    def emit(self, event: Event) -> None:
        """Deliver an event. When this returns, it is stored.

        Raises:
            OSError: The event cannot be written. No watcher receives it.
        """
        if isinstance(event, events.JournalEntry):
            self._journal.append(event)
        elif isinstance(event, live_events.ReportsReceived):
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

    def close(self) -> None:
        """Close the watchers, the last one first: it can still emit events to those before it."""
        for watcher in reversed(self._watchers):
            try:
                watcher.close()
            except Exception:
                _logger.warning("%s failed to close.", type(watcher).__name__, exc_info=True)

    def copy_state(self) -> RunState:
        """Return a copy of the state of the run. Can be called from any thread."""
        with self._lock:
            # A copy, because this thread changes its own while the caller reads.
            return copy.deepcopy(self._state)
