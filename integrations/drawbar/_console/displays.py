"""Show a run as plain lines. `live_displays` has the displays that are updated in place.

`Console` selects the events to show. `DisplayStatus` has the status as text for all displays.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Mapping
from typing import Protocol, TextIO

from drawbar._console.slow_phases import START_PHASES
from drawbar._observe.rates import RateWindow
from drawbar._process.output_lines import LoggedStream, StreamName
from drawbar._records.run_progress import format_clock, format_rate
from drawbar._records.timeline import FINAL_STATUSES, RunState

_MAX_METRICS = 6
_MAX_NAME_LENGTH = 60
# The log of a week stays readable, and progress is still visible.
_PLAIN_LINE_PERIOD_S = 10.0
MAX_COMMIT_LINES = 20
"""Commits in `_PLAIN_LINE_PERIOD_S` seconds that get a line each where there is no live line."""

logger = logging.getLogger("drawbar.train")


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
        has_workers = self.phase in ("running", *START_PHASES)
        text = self.phase + (workers if has_workers and number else "")
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


class OutputStreams:
    """Write to stdout and stderr, or to one file.

    `sys.stdout` and `sys.stderr` are looked up for each write, because tests replace them. A
    dedicated thread writes to them, so that a pipe that is not read (`python train.py | less`)
    never blocks the run.

    Args:
        file: Receives everything synchronously. Default: stdout and stderr.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._lines: queue.SimpleQueue[tuple[TextIO, str | bytes] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        # The caller of a custom file expects its content to be complete at any time.
        self._is_synchronous = file is not None

    def get_stream(self, name: StreamName) -> TextIO:
        """Return the stream of this name."""
        stream: TextIO = self._file or getattr(sys, name)
        # With `num_workers=0`, the stream also writes to the log of rank 0, which has only the
        # output of the training function.
        return stream.stream_without_log if isinstance(stream, LoggedStream) else stream

    def write_line(self, name: StreamName, text: str) -> None:
        """Write a line of text."""
        self.write(name, text + "\n")

    def write(self, name: StreamName, data: str | bytes) -> None:
        """Write text, or bytes without decoding them."""
        stream = self.get_stream(name)
        with self._lock:
            if not self._is_synchronous:
                self._lines.put((stream, data))
                if self._writer is None:
                    self._writer = threading.Thread(
                        target=self._write_lines, name="drawbar-console", daemon=True
                    )
                    self._writer.start()
                return
        _write(stream, data)

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                _write(*line)
            except Exception:
                logger.debug("a line could not be written", exc_info=True)

    def close(self) -> None:
        """Wait until every line is written. Later writes are synchronous."""
        with self._lock:
            self._is_synchronous = True
            self._lines.put(None)
        if self._writer is not None:
            self._writer.join()


def _write(stream: TextIO, data: str | bytes) -> None:
    if isinstance(data, str):
        stream.write(data)
    elif (buffer := getattr(stream, "buffer", None)) is None:  # a notebook stream, or a StringIO
        stream.write(data.decode(errors="backslashreplace"))
    else:
        stream.flush()
        buffer.write(data)
    stream.flush()


class Display(Protocol):
    """Output of a run. Its `DisplayStatus` is updated before a method is called.

    `print_line` (for lines of Drawbar), `print_user_line`, and `write_user_bytes` must show
    everything. The other methods may skip updates: there may be thousands of reports per second.
    """

    def print_line(self, text: str) -> None: ...

    def print_user_line(self, text: str, stream: StreamName) -> None: ...

    def write_user_bytes(self, data: bytes, stream: StreamName) -> None: ...

    def on_redraw(self, text: str, stream: StreamName) -> None: ...

    def on_state_change(self) -> None: ...

    def on_report(self) -> None: ...

    def on_commit(self) -> None: ...

    def close(self) -> None: ...


class _RateLimit:
    """Limit the number of lines in each period of `_PLAIN_LINE_PERIOD_S` seconds.

    Attributes:
        num_suppressed: Number of lines that were suppressed since the last `pop_suppressed()`.
    """

    def __init__(self, lines_per_period: int = 1) -> None:
        self._limit = lines_per_period
        self._num_remaining = lines_per_period
        self._period_end = 0.0
        self.num_suppressed = 0

    def should_show(self) -> bool:
        """Count one more line. Return whether it may be printed."""
        now = time.monotonic()
        if now >= self._period_end:
            self._period_end, self._num_remaining = now + _PLAIN_LINE_PERIOD_S, self._limit
        if self._num_remaining == 0:
            self.num_suppressed += 1
            return False
        self._num_remaining -= 1
        return True

    def pop_suppressed(self) -> int:
        """Return the number of suppressed lines and reset it."""
        num_suppressed, self.num_suppressed = self.num_suppressed, 0
        return num_suppressed


class PlainDisplay:
    """Plain lines, for log files and CI.

    Args:
        streams: Output streams.
        status: Status to show.
    """

    def __init__(self, streams: OutputStreams, status: DisplayStatus) -> None:
        self._streams = streams
        self._status = status
        self._shown_state = ""
        self._metrics = _RateLimit()
        self._commits = _RateLimit(MAX_COMMIT_LINES)
        self._redraws = _RateLimit()
        self._has_open_line = False  # bytes on stderr that did not end in a newline

    def print_line(self, text: str) -> None:
        """Print a line of Drawbar to stderr."""
        start = "\n" if self._has_open_line else ""
        self._has_open_line = False
        self._streams.write_line(
            "stderr", f"{start}[drawbar {self._status.format_elapsed()}] {text}"
        )

    def print_user_line(self, text: str, stream: StreamName) -> None:
        """Print a line of the training function."""
        self._streams.write_line(stream, text)

    def write_user_bytes(self, data: bytes, stream: StreamName) -> None:
        """Write output of a program unchanged."""
        self._streams.write(stream, data)
        if stream == "stderr":
            self._has_open_line = not data.endswith(b"\n")

    def on_redraw(self, text: str, stream: StreamName) -> None:
        """Print a state of a redrawn line at most every 10 s."""
        if self._redraws.should_show():
            self._streams.write_line(stream, text)

    def on_state_change(self) -> None:
        """Print the state if it has changed."""
        state = self._status.format_activity()
        if state != self._shown_state:
            if self._status.phase in ("restarting", *FINAL_STATUSES):
                self.close()
            self._shown_state = state
            self.print_line(state)

    def on_report(self) -> None:
        """Print the latest progress and report at most every 10 s."""
        if self._metrics.should_show():
            self._metrics.pop_suppressed()
            self.print_line(self._status.format_update())

    def on_commit(self) -> None:
        """Print the latest commit, up to `MAX_COMMIT_LINES` in 10 s."""
        if self._commits.should_show():
            self._write_commit(num_omitted=self._commits.pop_suppressed())

    def _write_commit(self, num_omitted: int) -> None:
        omitted = f"; {num_omitted} commits before it are not shown" if num_omitted else ""
        self.print_line(f"committed {self._status.last_checkpoint}{omitted}")

    def close(self) -> None:
        """Print the latest metrics and the latest commit if they were suppressed."""
        if self._metrics.pop_suppressed():
            self.print_line(self._status.format_update())
        if num_suppressed := self._commits.pop_suppressed():
            self._write_commit(num_omitted=num_suppressed - 1)
