"""Store each event, and deliver it to the run state and the watchers, in order.

An `EventBuffer` is the watcher for clients in other processes.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from drawbar._records import events, live_events
from drawbar._records.journal import Journal
from drawbar._records.live_events import Event
from drawbar._records.report_log import ReportLog
from drawbar._records.timeline import RunState

Emit = Callable[[Event], None]

MAX_EVENTS = 4096
"""Number of events that an `EventBuffer` keeps."""

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


@dataclass(frozen=True)
class EventPosition:
    """Position of a client: number of events and number of reports of rank 0 it has received."""

    events: int
    reports: int


class EventBuffer:
    """Watcher that buffers events for clients, which fetch them with `get_events_after`.

    The latest `MAX_EVENTS` events are buffered, but only the latest report and progress of rank 0:
    there may be thousands of reports per second, and a console shows few. A new client starts with
    the events that describe the current status.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Bounded: a suspended client must not fill the memory of the host.
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._last_status_event: Event | None = None
        self._last_checkpoint_event: Event | None = None
        self._last_report_event: Event | None = None
        self._last_progress: Event | None = None
        self._event_count = 0
        self._report_count = 0
        self._is_closed = False

    def on_event(self, event: Event) -> None:
        """Store an event. Reports do not wake clients."""
        with self._changed:
            match event:
                case live_events.ReportsReceived():
                    if event.rank == 0:
                        self._last_report_event = event.select_last()
                        self._report_count += len(event.indices)
                    return
                case live_events.ProgressReceived():
                    self._last_progress = event
                    return
                case (
                    live_events.RoundCompleted()
                    | live_events.ObservationReceived()
                    | live_events.AttemptEnding()
                ):
                    return  # only for watchers in the host
                case (
                    events.AttemptStarted()
                    | events.WorkersStarted()
                    | live_events.ValidationsPending()
                    | events.RunEnded()
                    | live_events.ControllerFailed()
                ):
                    self._last_status_event = event
                case events.CheckpointCommitted():
                    self._last_checkpoint_event = event
                case _:
                    pass
            self._events.append(event)
            self._event_count += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Do nothing: clients may not have received all events yet."""

    def wake_clients(self) -> None:
        """Wake all waiting clients, because no further events follow."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def get_events_after(
        self, position: EventPosition | None, timeout: float
    ) -> tuple[list[Event], EventPosition]:
        """Return the events after a position, and the new position.

        Args:
            position: Position of the client. None returns the events that describe the current
                status.
            timeout: Maximum number of seconds to wait for the first event.
        """
        with self._changed:
            if position is None:
                status_events = (self._last_status_event, self._last_checkpoint_event)
                new_events = [event for event in status_events if event is not None]
                # Count no report as received, so that a new client is shown the latest one.
                position = EventPosition(self._event_count, 0)
            else:
                num_received = position.events
                self._changed.wait_for(
                    lambda: self._is_closed or self._event_count > num_received, timeout
                )
                new_events = self._events_after(num_received)
            if self._last_progress is not None:
                new_events.append(self._last_progress)  # clients may receive it again
            if self._last_report_event is not None and self._report_count > position.reports:
                new_events.append(self._last_report_event)
            return new_events, EventPosition(self._event_count, self._report_count)

    def _events_after(self, num_received: int) -> list[Event]:
        num_new = self._event_count - num_received
        num_lost = num_new - len(self._events)
        if num_lost > 0:
            text = f"{num_lost} lines are not shown because they arrived too fast"
            return [live_events.Notice(text), *self._events]
        return list(self._events)[len(self._events) - num_new :]
