"""Status of a run for the displays, as text."""

from __future__ import annotations

import time
from collections.abc import Mapping

from drawbar.train._history.run_progress import RateWindow, format_clock, format_rate
from drawbar.train._history.timeline import RunState

_MAX_METRICS = 6
_MAX_NAME_LENGTH = 60


class DisplayStatus:
    """Status of a run for the displays, which also read it from other threads.

    Attributes:
        path: Run directory.
        state: State of the run, without metrics.
        phase: Status of the run, or a more specific text such as "waiting for validations".
        detail: Details of the phase.
        last_report: Index and metrics of the latest report of rank 0.
        report_rate: Reports of rank 0 per second.
        last_checkpoint: Description of the latest checkpoint.
        checkpoints: Metrics of each committed checkpoint, by name.
        redrawn_line: Line that the user's code is redrawing, such as a progress bar.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.state = RunState()
        self.phase = ""
        self.detail = ""
        self.last_report: tuple[int, Mapping[str, object]] | None = None
        self.report_rate = RateWindow()
        self.last_checkpoint = ""
        self.checkpoints: dict[str, Mapping[str, object]] = {}
        self.redrawn_line = ""
        self._start_time = time.monotonic()

    def format_elapsed(self) -> str:
        """Return the time since the start, such as "01:23"."""
        return format_clock(time.monotonic() - self._start_time)

    def format_activity(self) -> str:
        """Return the phase with its details."""
        number = self.state.num_workers
        workers = f" on {number} worker{'s' * (number != 1)}"
        text = self.phase + (workers if self.phase == "running" and number else "")
        return f"{text}: {self.detail}" if self.detail else text

    def format_last_report(self) -> str:
        """Return the latest report of rank 0, "" if there is none."""
        if self.last_report is None:
            return ""
        index, metrics = self.last_report
        return f"report {index}: {format_metrics(metrics)}"

    def format_progress(self) -> str:
        """Return percent, throughput, and ETA, or reports per second, or "" if none is known."""
        if self.state.progress is not None:
            return str(self.state.progress)
        rate = self.report_rate.get_rate()
        return format_rate(rate, "reports") if rate else ""

    def format_update(self) -> str:
        """Return the progress, if it was set, and the latest report of rank 0."""
        progress = str(self.state.progress or "")
        return " | ".join(filter(None, (progress, self.format_last_report())))

    def format_line(self) -> str:
        """Return the live line, its most important parts first, since its end may be cut off."""
        activity, progress = self.format_activity(), self.format_progress()
        report, checkpoint = self.format_last_report(), self.last_checkpoint
        parts = filter(None, (activity, progress, self.redrawn_line, report, checkpoint))
        return f"[drawbar {self.format_elapsed()}] " + " | ".join(parts)


def format_metrics(metrics: Mapping[str, object]) -> str:
    """Return the first numbers and strings of reported metrics, such as "loss 0.1, epoch 2"."""
    parts = [
        f"{_make_printable(key[:_MAX_NAME_LENGTH])} {text}"
        for key, value in metrics.items()
        if (text := _format_value(value))
    ]
    return ", ".join(parts[:_MAX_METRICS])


def _make_printable(text: str) -> str:
    """Escape characters that could change the output of the terminal."""
    return text if text.isprintable() else ascii(text)[1:-1]


def _format_value(value: object) -> str:
    if isinstance(value, bool | int | str):
        return _make_printable(str(value)[:24])
    try:
        return f"{float(value):.4g}"  # type: ignore[arg-type]  # numpy scalars, 0-d tensors
    except (TypeError, ValueError):
        return ""
