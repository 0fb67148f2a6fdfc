"""Emit the progress of an attempt, and store it in the journal from time to time."""

from __future__ import annotations

import time

from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import ProgressRecorded
from drawbar.train._history.live_events import ProgressReceived
from drawbar.train._history.run_progress import RateWindow, RunProgress
from drawbar.train._protocol.messages import ProgressSet

RECORD_INTERVAL_S = 30.0


class ProgressRecorder:
    """Progress of one attempt.

    The rate counts only this attempt, so steps that are repeated after a restart count once.

    Args:
        attempt: Number of the attempt.
        emit: Callback that publishes events.
    """

    def __init__(self, attempt: int, emit: Emit) -> None:
        self._attempt = attempt
        self._emit = emit
        self._rate = RateWindow()
        self._progress: RunProgress | None = None
        self._recorded: RunProgress | None = None
        self._next_record = 0.0

    def on_progress(self, message: ProgressSet) -> None:
        """Emit the progress that a rank has sent."""
        self._rate.add(message.time, message.done)
        self._progress = RunProgress(
            done=message.done,
            total=message.total,
            unit=message.unit,
            time=message.time,
            rate=self._rate.get_rate(),
        )
        self._emit(ProgressReceived(self._progress))
        if time.monotonic() >= self._next_record:
            self.record()

    def record(self) -> None:
        """Store the latest progress in the journal, unless it is stored."""
        progress = self._progress
        if progress is None or progress is self._recorded:
            return
        self._recorded = progress
        self._next_record = time.monotonic() + RECORD_INTERVAL_S
        self._emit(ProgressRecorded(time=time.time(), attempt=self._attempt, progress=progress))
