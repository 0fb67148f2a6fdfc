"""Buffer of events for the clients of a host actor."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from drawbar._records import events, live_events
from drawbar._records.live_events import Event

MAX_EVENTS = 4096
"""Number of events that an `EventBuffer` keeps."""


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
