"""The one way in for what happens in a run: journal, live state, and whoever watches."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from drawbar.train._history.events import Event, JournalEntry
from drawbar.train._history.journal import Journal
from drawbar.train._history.timeline import RunState

Emit = Callable[[Event], None]

_logger = logging.getLogger(__name__)


class Watcher(Protocol):
    """Whoever watches a run: the console, callbacks, those who follow it from elsewhere."""

    def on_event(self, event: Event) -> None:
        """Take in the next event, without waiting for anything."""
        ...

    def close(self) -> None:
        """Show what was held back: nothing more comes."""
        ...


class EventStream:
    """Tells each event once, in order: to the journal first, then to all others.

    Args:
        journal: Keeps what is history.
        snapshot: How the run stands so far.
        watchers: They never steer the run: what one raises is logged, and the others hear on.
    """

    def __init__(self, journal: Journal, state: RunState, watchers: Sequence[Watcher]) -> None:
        self._journal = journal
        self._state = state
        self._watchers = watchers
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Tell an event. When this returns, the journal has it.

        Raises:
            OSError: The journal cannot be written; nobody else has heard of the event then.
        """
        if isinstance(event, JournalEntry):
            self._journal.append(event)
        # Not around the journal and the watchers: a slow disk must not hold up who asks how it
        # stands.
        with self._lock:
            self._state.apply(event)
        for watcher in self._watchers:
            try:
                watcher.on_event(event)
            except Exception:
                _logger.warning("%s was not told", type(event).__name__, exc_info=True)

    def copy_state(self) -> RunState:
        """Say how the run stands. From any thread."""
        with self._lock:
            # A copy: the stream goes on changing its own while the caller reads.
            return copy.deepcopy(self._state)
