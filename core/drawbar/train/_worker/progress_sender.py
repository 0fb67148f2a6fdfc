"""Send the progress that the training function sets, at most once per second."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from drawbar._records.run_progress import RunProgress
from drawbar.train._protocol.messages import Message, Observation

SEND_INTERVAL_S = 1.0


class ProgressSender:
    """Progress of one rank in one attempt. Only rank 0 sends it.

    Args:
        rank: World rank.
        send: Callback that sends messages to the controller.
    """

    def __init__(self, rank: int, send: Callable[[Message], None]) -> None:
        self._rank = rank
        self._send = send
        self._pending: tuple[int | float, int | float | None, str] | None = None
        self._sent: tuple[int | float, int | float | None, str] | None = None
        self._next_send = 0.0

    def set(self, done: int | float, total: int | float | None, unit: str) -> None:
        """Store the progress, and send it if it is due or everything is done."""
        if self._rank:
            return
        self._pending = (done, total, unit)
        if time.monotonic() >= self._next_send or (total is not None and done >= total):
            self.flush()

    def flush(self) -> None:
        """Send the latest progress if it was not sent."""
        pending, self._pending = self._pending, None
        if pending is None or pending == self._sent:
            return
        self._sent = pending
        self._next_send = time.monotonic() + SEND_INTERVAL_S
        done, total, unit = pending
        progress = RunProgress(done=done, total=total, unit=unit, time=time.time())
        self._send(Observation(kind="progress", payload=msgspec.to_builtins(progress)))
