"""Show a run as one live terminal line or as plain lines.

`Console` selects the events to show, and `DisplayStatus` has the content of the live line.
"""

from __future__ import annotations

import codecs
import logging
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol, TextIO

from drawbar.train._console.display_status import DisplayStatus
from drawbar.train._history.timeline import FINAL_STATUSES
from drawbar.train._protocol.messages import OutputLine
from drawbar.train._protocol.output_lines import LineSplitter, LoggedStream, StreamName

if TYPE_CHECKING:
    from rich.console import RenderHook

# The log of a week stays readable, and progress is still visible.
_PLAIN_LINE_PERIOD_S = 10.0
MAX_COMMIT_LINES = 20
"""Commits in `_PLAIN_LINE_PERIOD_S` seconds that get a line each where there is no live line."""

logger = logging.getLogger(__name__)


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


def _make_cursor_hook() -> RenderHook:
    """Return a hook that leaves the cursor at the start of the live line and erases from there.

    rich leaves the cursor at the end of the line. A terminal that becomes narrower wraps the line,
    and rich would erase only its last part. The number of parts is unknown, because some terminals
    truncate the line instead, but all of them keep the cursor at its character. The lines below are
    erased from the second column on: tmux interprets erasing from the first column of the screen as
    `clear`, and saves the content to its history.
    """
    from rich.console import ConsoleRenderable, RenderHook
    from rich.control import Control
    from rich.segment import ControlType, Segment, Segments

    carriage_return = Control(ControlType.CARRIAGE_RETURN)
    erase = Segment("\r\x1b[2K\x1b[C\x1b[J\r", None, [(ControlType.CARRIAGE_RETURN,)])

    class _CursorHook(RenderHook):
        def process_renderables(
            self, renderables: list[ConsoleRenderable]
        ) -> list[ConsoleRenderable]:
            return [Segments([erase]), *renderables, carriage_return]

    return _CursorHook()


class TerminalDisplay:
    """One live line at the bottom of the terminal, redrawn by rich four times per second.

    Output to a stream that is not a terminal (`python train.py > out.txt`) is not changed.

    Args:
        streams: Output streams.
        status: Status to show.
        file: Terminal of the live line. Default: stderr.
    """

    def __init__(self, streams: OutputStreams, status: DisplayStatus, file: TextIO | None) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live
        from rich.text import Text

        def draw() -> Text:
            return Text(status.format_line(), no_wrap=True, overflow="ellipsis")

        self._streams = streams
        self._status = status
        names: tuple[StreamName, ...] = ("stdout", "stderr")
        self._splitters = {name: LineSplitter(name, self._show_line) for name in names}
        self._decoders = {
            name: codecs.getincrementaldecoder("utf-8")("backslashreplace") for name in names
        }
        self._live = Live(
            console=RichConsole(file=file, stderr=True),
            get_renderable=draw,
            transient=True,
            redirect_stdout=file is None and streams.get_stream("stdout").isatty(),
            redirect_stderr=file is None,
        )
        self._live.start()
        self._live.console.push_render_hook(_make_cursor_hook())

    def print_line(self, text: str) -> None:
        """Print a line of Drawbar above the live line."""
        self._print_above(f"[drawbar {self._status.format_elapsed()}] {text}")

    def print_user_line(self, text: str, stream: StreamName) -> None:
        """Print a line of the training function above the live line."""
        if self._streams.get_stream(stream).isatty():
            self._print_above(text)
        else:
            self._streams.write_line(stream, text)

    def write_user_bytes(self, data: bytes, stream: StreamName) -> None:
        """Print complete lines of a program's output above the live line."""
        if self._streams.get_stream(stream).isatty():
            self._splitters[stream].feed(self._decoders[stream].decode(data))
        else:
            self._streams.write(stream, data)

    def _show_line(self, line: OutputLine) -> None:
        self._status.redrawn_line = line.text if line.is_redraw else ""
        if not line.is_redraw:
            self._print_above(line.text)

    def _print_above(self, text: str) -> None:
        self._live.console.out(text, highlight=False)

    def on_redraw(self, text: str, stream: StreamName) -> None:
        """Do nothing: rich redraws the live line periodically."""

    def on_state_change(self) -> None:
        """Do nothing: rich redraws the live line periodically."""

    on_report = on_commit = on_state_change

    def close(self) -> None:
        """Print unfinished lines and replace the live line with a last plain one."""
        for splitter in self._splitters.values():
            splitter.finish()
        self._live.refresh()
        # Remove our hook first, because `stop()` removes the last hook and expects it to be rich's.
        self._live.console.pop_render_hook()
        self._live.stop()
        self._streams.write_line("stderr", self._status.format_line())
