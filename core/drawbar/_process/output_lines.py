"""Split printed text into the lines that a terminal would show."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal, TextIO

import msgspec

StreamName = Literal["stdout", "stderr"]

_REDRAW_SECONDS = 0.25
_CURSOR_UP = "\x1b[A"


class LoggedStream:
    """Base class of standard streams that also write to the log of a rank.

    Attributes:
        stream_without_log: The stream that this one replaces. The console writes to it.
    """

    stream_without_log: TextIO


class LineSplitter:
    """Split the text of one stream into lines.

    A progress bar redraws its line: it prints a carriage return and then the new text of the line.
    While a line is being redrawn, its current text is sent as a transient line, at most every
    0.25 s. Only its last text is sent as a normal line.

    Nested progress bars move down with a newline and up again with an escape sequence. After the
    first escape sequence, a newline therefore no longer completes a redrawn line. The last text of
    the bars is sent before the next line that is not redrawn, or by `finish()`.

    Args:
        stream: Stream to which the text is printed. It is stored in every line.
        send: Receives each line, in the thread that calls `feed()` or `finish()`.
    """

    def __init__(self, stream: StreamName, send: Callable[[OutputLine], None]) -> None:
        self._stream = stream
        self._send = send
        self._lock = threading.RLock()  # a signal handler may print while this prints
        self._parts: list[str] = []  # text of the unfinished line
        self._is_redrawn = False  # whether the unfinished line contains a carriage return
        self._is_nested = False  # whether an escape sequence of nested progress bars was printed
        self._held_line = ""  # last text of nested progress bars, if it is not sent yet
        self._last_sent = 0.0

    def feed(self, text: str) -> None:
        """Add printed text and send the lines that it completes."""
        with self._lock:
            if text.isprintable() and not self._is_redrawn:
                self._parts.append(text)  # `print()` writes each argument separately
            else:
                self._split(text)

    def finish(self) -> None:
        """Send the unfinished line, if there is one."""
        with self._lock:
            self._send_held_line()
            self._is_redrawn = False
            if last_state("".join(self._parts)):
                self._end_line()

    def _split(self, text: str) -> None:
        if _CURSOR_UP in text:
            self._is_nested = True
            text = text.replace(_CURSOR_UP, "\r")
        *ends, remainder = text.split("\n")
        for end in ends:
            self._append(end)
            self._end_line()
        self._append(remainder)
        if self._is_redrawn:
            self._send_transient(last_state(self._parts[0]))

    def _append(self, text: str) -> None:
        if text:
            self._parts.append(text)
        # Keep only the last state of a redrawn line: a progress bar may be redrawn for hours
        # before its newline.
        if "\r" in text or (text and self._is_redrawn):
            line = "".join(self._parts)
            self._is_redrawn = True
            tail = "\r" if line.endswith("\r") else ""
            self._parts = [last_state(line) + tail]

    def _end_line(self) -> None:
        line = last_state("".join(self._parts))
        is_redrawn = self._is_redrawn
        self._parts, self._is_redrawn = [], False
        if is_redrawn and self._is_nested:
            self._held_line = line
            self._send_transient(line)
            return
        self._send_held_line()
        self._send(OutputLine(text=line, stream=self._stream))

    def _send_held_line(self) -> None:
        if self._held_line:
            self._send(OutputLine(text=self._held_line, stream=self._stream))
            self._held_line = ""

    def _send_transient(self, state: str) -> None:
        now = time.monotonic()
        if state and now - self._last_sent >= _REDRAW_SECONDS:
            self._last_sent = now
            self._send(OutputLine(text=state, stream=self._stream, is_redraw=True))


def last_state(line: str) -> str:
    """Return the last state of a line that carriage returns redraw."""
    return next((state for state in reversed(line.split("\r")) if state), "")


class OutputLine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A line for the driver's console.

    Attributes:
        text: The line.
        stream: Stream to which the line was written.
        is_redraw: True if the line was redrawn with a carriage return, as tqdm does.
        is_log_record: True for a logged error, which is sent in addition to the printed line.
    """

    text: str
    stream: Literal["stdout", "stderr"] = "stdout"
    is_redraw: bool = False
    is_log_record: bool = False
