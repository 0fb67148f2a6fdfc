"""What happens in a run, kept for those who follow it from other processes."""

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
    """How much a follower has seen: events in all, and reports of rank 0."""

    events: int
    reports: int


class Relay:
    """Watches a run for followers: `since` gives what they are to show.

    The newest `KEPT` events are kept. Of rank 0's reports only the newest one is: there may be
    thousands per second, and a console shows few. A follower who comes later begins with how the
    run stands.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Bounded: a follower that is stopped must not fill the memory of who hosts the run.
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._state: Event | None = None
        self._checkpoint: Event | None = None
        self._report: Event | None = None
        self._count = 0
        self._reports = 0
        self._over = False

    def on_event(self, event: Event) -> None:
        """Keep an event. A report wakes nobody."""
        with self._changed:
            match event:
                case ReportReceived():
                    if event.rank == 0:
                        self._report = event
                        self._reports += 1
                    return
                case RoundCompleted():
                    return  # for callbacks, which the host has
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
        """Keep all that was taken: followers may not have it yet."""

    def release(self) -> None:
        """Let nobody wait any more: nothing more comes."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def since(self, seen: Position | None, timeout: float) -> tuple[list[Event], Position]:
        """Give the events after a position, or how the run stands without one.

        Waits `timeout` seconds for the first one, at most.
        """
        with self._changed:
            if seen is None:
                standing = (self._state, self._checkpoint)
                events = [event for event in standing if event is not None]
                # No report is counted as seen, so that whoever comes later is shown the newest.
                seen = Position(self._count, 0)
            else:
                already = seen.events
                self._changed.wait_for(lambda: self._over or self._count > already, timeout)
                events = self._events_after(already)
            if self._report is not None and self._reports > seen.reports:
                events.append(self._report)
            return events, Position(self._count, self._reports)

    def _events_after(self, already: int) -> list[Event]:
        new = self._count - already
        lost = new - len(self._events)
        if lost > 0:
            notice = Notice(f"{lost} lines came too fast to be shown here")
            return [notice, *self._events]
        return list(self._events)[len(self._events) - new :]
