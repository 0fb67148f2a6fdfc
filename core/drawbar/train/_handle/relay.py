"""Buffer the latest events of a run for clients in other processes."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from drawbar.train._history.events import (
    AttemptStarted,
    CheckpointCommitted,
    ControllerFailed,
    Event,
    Notice,
    ReportReceived,
    RoundCompleted,
    RunEnded,
    ValidationsPending,
    WorkersStarted,
)

KEPT = 4096


@dataclass(frozen=True)
class Position:
    """Position of a client: number of events and number of reports of rank 0 it has received."""

    events: int
    reports: int


class Relay:
    """Watcher that buffers events for clients, which fetch them with `since`.

    The latest `KEPT` events are buffered, but only the latest report of rank 0: there may be
    thousands of reports per second, and a console shows few. A new client starts with the events
    that describe the current status.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Bounded: a suspended client must not fill the memory of the host.
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._state: Event | None = None
        self._checkpoint: Event | None = None
        self._report: Event | None = None
        self._count = 0
        self._reports = 0
        self._over = False

    def on_event(self, event: Event) -> None:
        """Store an event. Reports do not wake clients."""
        with self._changed:
            match event:
                case ReportReceived():
                    if event.rank == 0:
                        self._report = event
                        self._reports += 1
                    return
                case RoundCompleted():
                    return  # only for callbacks, which run in the host
                case (
                    AttemptStarted()
                    | WorkersStarted()
                    | ValidationsPending()
                    | RunEnded()
                    | ControllerFailed()
                ):
                    self._state = event
                case CheckpointCommitted():
                    self._checkpoint = event
                case _:
                    pass
            self._events.append(event)
            self._count += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Do nothing: clients may not have received all events yet."""

    def release(self) -> None:
        """Wake all waiting clients, because no further events follow."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def since(self, seen: Position | None, timeout: float) -> tuple[list[Event], Position]:
        """Return the events after a position, and the new position.

        Args:
            seen: Position of the client, or None for the events that describe the current status.
            timeout: Maximum number of seconds to wait for the first event.
        """
        with self._changed:
            if seen is None:
                status_events = (self._state, self._checkpoint)
                events = [event for event in status_events if event is not None]
                # Count no report as seen, so that a new client is shown the latest one.
                seen = Position(self._count, 0)
            else:
                num_seen = seen.events
                self._changed.wait_for(lambda: self._over or self._count > num_seen, timeout)
                events = self._events_after(num_seen)
            if self._report is not None and self._reports > seen.reports:
                events.append(self._report)
            return events, Position(self._count, self._reports)

    def _events_after(self, num_seen: int) -> list[Event]:
        num_new = self._count - num_seen
        num_lost = num_new - len(self._events)
        if num_lost > 0:
            notice = Notice(f"{num_lost} lines are not shown because they arrived too fast")
            return [notice, *self._events]
        return list(self._events)[len(self._events) - num_new :]
