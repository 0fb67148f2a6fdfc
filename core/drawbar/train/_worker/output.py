"""Where the output of a worker goes: all of it to a file, and what is worth showing to the driver.

The file has the truth: what this process and its children write, C++ libraries included, byte for
byte. The driver gets lines, those of the children and libraries on its stderr (see `log_file`). A
progress bar that is redrawn in place (tqdm) would be thousands of them, so its states are said a
few times per second, marked as transient. Of the ranks that nobody watches, only errors are said:
log records of level ERROR and above, which are said of every rank.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from drawbar.train._lines import LineSplitter, StreamName
from drawbar.train._messages import Printed
from drawbar.train._worker import fork_counter
from drawbar.train._worker.log_file import LogFile, flush_c_stdout

SendLine = Callable[[Printed], None]
OnWriteError = Callable[[OSError], None]
_FILENO: dict[StreamName, int] = {"stdout": 1, "stderr": 2}


@contextmanager
def capture_output(
    log_path: Path, say: SendLine | None, *, errors_only: bool, redirect_fds: bool
) -> Iterator[None]:
    """Write everything this process prints to a file, and say what the driver should show.

    Args:
        log_path: The file, appended to; its folder is made.
        say: Takes each line for the driver's console; called in the printing thread, or, with what
            C code and children wrote, in one of its own; never in a forked child. None says
            nothing.
        errors_only: Say no printed line. Log records of level ERROR and above are said in any case,
            marked as such, since the console may show them instead of what is printed.
        redirect_fds: Point file descriptors 1 and 2 at the file, so that children and C++ libraries
            write there too. If False, `sys.stdout` and `sys.stderr` write to the file besides where
            they wrote before, and `pdb` and `input()` work as ever.

    Streams, descriptors and the log record factory are restored at the end, also after an
    exception; an unfinished last line is said then. What the file cannot take, say because its disk
    is full, is said alone.

    Raises:
        OSError: The file cannot be made.
    """
    # Streams are restored in the reverse order, so that none writes to a closed log.
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undo:
        log = undo.enter_context(open(log_path, "ab", buffering=0))
        missed = _make_write_error_handler(log_path, say)
        watched = None
        if redirect_fds and say and not errors_only:
            watched = undo.enter_context(_forward_native_output(log_path, say))
        for name in _FILENO:
            lines = _LineSplitter(name, say) if say and not errors_only else None
            if redirect_fds:
                _redirect(_FILENO[name], log.fileno(), getattr(sys, name), undo)
                stream: _LogStream | _TeeStream = _LogStream(name, lines, watched, missed)
            else:
                stream = _TeeStream(name, getattr(sys, name), log, lines, missed)
            undo.callback(setattr, sys, name, getattr(sys, name))
            undo.callback(stream.stop_capture)
            setattr(sys, name, stream)
        if say:
            undo.enter_context(_forward_error_records(say))
        yield


@contextmanager
def _forward_native_output(path: Path, say: SendLine) -> Iterator[LogFile]:
    """Have what others than Python write to the log said, line by line."""
    lines = _LineSplitter("stderr", say)
    with LogFile(path, lines.feed) as log:
        yield log
    lines.finish()


def _make_write_error_handler(path: Path, say: SendLine | None) -> OnWriteError:
    """Make what takes the errors of a log that cannot be written, and says the first one.

    The user's `print` does not raise them: training does not end because its log's disk is full.
    """
    there, is_told = fork_counter.count, False

    def on_write_error(error: OSError) -> None:
        nonlocal is_told
        if say is None or is_told or fork_counter.count != there:
            return
        is_told = True
        text = f"{path} does not have all that is printed from here on: {error}"
        say(Printed(text=text, stream="stderr"))

    return on_write_error


def _redirect(fd: int, log: int, stream: TextIO, undo: ExitStack) -> None:
    """Point `fd` at the log, with what `stream` still buffers on the right side of the change."""
    # Before the descriptors change: what is buffered belongs where it was written to.
    stream.flush()
    flush_c_stdout()
    # Undone last to first: what is buffered goes into the log, then the descriptor goes back.
    before = os.dup(fd)
    undo.callback(os.close, before)
    undo.callback(os.dup2, before, fd)
    undo.callback(stream.flush)
    undo.callback(flush_c_stdout)
    os.dup2(log, fd)


class _LogStream(io.TextIOWrapper):
    """A text stream on descriptor 1 or 2, unbuffered, that also hands its text to `_LineSplitter`.

    A library's logging handler may hold it longer than the capture lasts; then it passes the text
    on to whatever `sys.stdout` or `sys.stderr` is by that time, such as the next capture's stream.
    """

    def __init__(
        self,
        name: StreamName,
        lines: _LineSplitter | None,
        log: LogFile | None,
        missed: OnWriteError,
    ) -> None:
        # Unbuffered: what was printed before a SIGKILL is in the log.
        raw = io.FileIO(_FILENO[name], "wb", closefd=False)
        super().__init__(
            cast(io.BufferedWriter, raw),
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        self._stream_name = name
        self._lines = lines
        self._log = log
        self._missed = missed
        self._retired = False

    def write(self, text: str, /) -> int:
        """Write to the file at once; in the process that made this stream, say it too."""
        if self._retired and (current := getattr(sys, self._stream_name)) is not self:
            return cast(int, current.write(text))
        log, data = self._log, text.encode("utf-8", "backslashreplace")
        try:
            if log is None or not log.write(data):
                # Not by way of this stream's own buffer, which would try again at each flush.
                self.buffer.write(data)
                return len(text)
        except OSError as error:
            self._missed(error)
        if self._lines:
            self._lines.feed(text)
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Write to the file what is not to be said as lines."""
        if self._log is None or not self._log.write(data):
            self.buffer.write(data)

    def close(self) -> None:
        """Do nothing: like the standard streams, it lasts as long as the process."""

    def stop_capture(self) -> None:
        self._retired, self._log = True, None
        if self._lines:
            self._lines.finish()


def write_to_log(data: bytes) -> None:
    """Write to this process's log, while its output is captured, and say nothing of it."""
    if isinstance(sys.stdout, _LogStream):
        sys.stdout.write_bytes(data)


class _TeeStream:
    """The user's own stream, which also writes to the log. In all else it is the user's stream."""

    def __init__(
        self,
        name: StreamName,
        original: TextIO,
        log: io.FileIO,
        lines: _LineSplitter | None,
        missed: OnWriteError,
    ) -> None:
        self._stream_name = name
        self._original = original
        self._log: io.FileIO | None = log
        self._lines = lines
        self._missed = missed

    def write(self, text: str) -> int:
        current = getattr(sys, self._stream_name)
        if self._log is None and current is not self:
            return cast(int, current.write(text))
        written = self._original.write(text)
        if self._log is not None:
            try:
                self._log.write(text.encode("utf-8", "backslashreplace"))
            except ValueError:  # closed: the capture ended in this moment
                pass
            except OSError as error:
                self._missed(error)
        if self._lines:
            self._lines.feed(text)
        return written

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def stop_capture(self) -> None:
        self._log = None
        if self._lines:
            self._lines.finish()


class _LineSplitter(LineSplitter):
    """Split printed text into lines; do nothing in a forked child, which must not take the lock."""

    def __init__(self, stream: StreamName, send: SendLine) -> None:
        super().__init__(stream, send)
        self._forks = fork_counter.count

    def feed(self, text: str) -> None:
        if fork_counter.count == self._forks:
            super().feed(text)

    def finish(self) -> None:
        if fork_counter.count == self._forks:
            super().finish()


@contextmanager
def _forward_error_records(say: SendLine) -> Iterator[None]:
    """Say each log record of level ERROR and above, whichever logger it comes from.

    The records are taken where they are made (`logging.setLogRecordFactory`). A handler on the root
    logger would miss the loggers that do not propagate (Transformers, Lightning), and would turn
    the user's `logging.basicConfig()` into a call without effect.
    """
    # Kept, not replaced by Python's own: a library may have put one there.
    make = logging.getLogRecordFactory()
    format_error = logging.Formatter("%(levelname)s %(name)s: %(message)s").format
    pid = os.getpid()

    def make_and_say(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        level = record.levelno or 0  # logging.makeLogRecord() begins without one
        if level >= logging.ERROR and os.getpid() == pid and not ended:
            for line in _formatted(record).split("\n"):
                say(Printed(text=line, stream="stderr", record=True))
        return record

    def _formatted(record: logging.LogRecord) -> str:
        try:
            return format_error(record)
        except Exception:  # the arguments do not fit the message: logging says so on stderr
            return f"{record.levelname} {record.name}: {record.msg}"

    ended = False
    logging.setLogRecordFactory(make_and_say)
    try:
        yield
    finally:
        ended = True  # for a factory of the user's that wraps this one
        if logging.getLogRecordFactory() is make_and_say:
            logging.setLogRecordFactory(make)
