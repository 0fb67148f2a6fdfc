"""What a run shows, kept for those who follow it from other processes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drawbar.train._console.console import Console
from drawbar.train._errors import WorkerFailure
from drawbar.train._messages import Printed

KEPT = 4096

Call = tuple[str, tuple[Any, ...]]
"""A method of `Console` and its arguments."""


@dataclass(frozen=True)
class Position:
    """How much a follower has seen: calls in all, and reports of rank 0."""

    calls: int
    reports: int


class Relay(Console):
    """A console that shows nothing itself: `since` gives what another one is to show.

    The newest `KEPT` calls are kept. Of rank 0's reports only the newest one is: there may be
    thousands per second, and a console shows few. A follower who comes later begins with how the
    run stands.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: deque[Call] = deque(maxlen=KEPT)
        self._standing: dict[str, Call] = {}
        self._report: Call | None = None
        self._count = 0
        self._reports = 0
        self._over = False

    def state(self, name: str, detail: str = "") -> None:
        """Take what the run is doing."""
        self._take("state", name, detail, stands=True)

    def workers(self, count: int) -> None:
        """Take how many workers the run has."""
        self._take("workers", count, stands=True)

    def checkpoint(self, path: str, nbytes: int, seconds: float) -> None:
        """Take that a checkpoint is committed."""
        self._take("checkpoint", path, nbytes, seconds, stands=True)

    def validated(self, name: str, metrics: Mapping[str, Any], seconds: float) -> None:
        """Take what came of a checkpoint's validation."""
        self._take("validated", name, metrics, seconds)

    def printed(self, rank: int, line: Printed) -> None:
        """Take a line of the training function."""
        self._take("printed", rank, line)

    def notice(self, text: str) -> None:
        """Take what the user should know or do."""
        self._take("notice", text)

    def failure(self, failure: WorkerFailure, is_raised: bool = False) -> None:
        """Take a worker's failure."""
        self._take("failure", failure, is_raised)

    def report(self, rank: int, index: int, metrics: Mapping[str, Any]) -> None:
        """Take note of a report. Wakes nobody."""
        if rank == 0:
            with self._changed:
                self._report = ("report", (rank, index, metrics))
                self._reports += 1

    def close(self) -> None:
        """Keep all that was taken: followers may not have it yet."""

    def release(self) -> None:
        """Let nobody wait any more: nothing more comes."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _take(self, method: str, *arguments: Any, stands: bool = False) -> None:
        call = (method, arguments)
        with self._changed:
            self._calls.append(call)
            self._count += 1
            if stands:
                self._standing[method] = call
            self._changed.notify_all()

    def since(self, seen: Position | None, timeout: float) -> tuple[list[Call], Position]:
        """Give the calls after a position, or how the run stands without one.

        Waits `timeout` seconds for the first one, at most.
        """
        with self._changed:
            if seen is None:
                calls = list(self._standing.values())
                seen = Position(self._count, 0)
            else:
                already = seen.calls
                self._changed.wait_for(lambda: self._over or self._count > already, timeout)
                calls = self._calls_after(already)
            if self._report is not None and self._reports > seen.reports:
                calls.append(self._report)
            return calls, Position(self._count, self._reports)

    def _calls_after(self, already: int) -> list[Call]:
        new = self._count - already
        lost = new - len(self._calls)
        if lost > 0:
            notice: Call = ("notice", (f"{lost} lines came too fast to be shown here",))
            return [notice, *self._calls]
        return list(self._calls)[len(self._calls) - new :]
