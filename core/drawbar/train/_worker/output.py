"""Capture the output of a worker in a log and send lines to the driver.

The log contains every byte that this process, its children, and C++ libraries write. The driver
receives lines, including stderr lines of children and libraries (see `log_file`). Progress bars
that redraw a line in place (tqdm) would send thousands of lines, so their states are sent a few
times per second and marked as transient. Ranks above 0 send only log records of level ERROR and
above.
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

from drawbar.train import _threads
from drawbar.train._protocol.messages import OutputLine
from drawbar.train._protocol.output_lines import LineSplitter, LoggedStream, StreamName
from drawbar.train._worker.log_file import LogFile, flush_c_stdout

SendLine = Callable[[OutputLine], None]
OnWriteError = Callable[[OSError], None]
_FILENO: dict[StreamName, int] = {"stdout": 1, "stderr": 2}


@contextmanager
def capture_output(
    log_path: Path, send: SendLine | None, *, errors_only: bool, redirect_fds: bool
) -> Iterator[None]:
    """Write the output of this process to a log and send lines to the driver.

    On exit, also after an exception, the streams, file descriptors, and log record factory are
    restored, and an unfinished last line is sent. If the log cannot be written, for example because
    the disk is full, lines are still sent.

    Args:
        log_path: Log file, opened for appending. Its directory is created.
        send: Receives each line for the driver's console. It is called in the printing thread, or,
            for output of C code and children, in a separate thread; never in a forked child.
            None sends nothing.
        errors_only: Do not send printed lines. Log records of level ERROR and above are always
            sent, and are marked, because the console may show them instead of printed lines.
        redirect_fds: Redirect file descriptors 1 and 2 to the log, so that output of children and
            C++ libraries is captured too. If False, `sys.stdout` and `sys.stderr` write to their
            previous targets and to the log, so `pdb` and `input()` keep working.

    Raises:
        OSError: The log cannot be created.
    """
    # Streams are restored in reverse order, so that none writes to a closed log.
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undo:
        log = undo.enter_context(open(log_path, "ab", buffering=0))
        on_write_error = _make_write_error_handler(log_path, send)
        log_file = None
        if redirect_fds and send and not errors_only:
            log_file = undo.enter_context(_forward_native_output(log_path, send))
        for name in _FILENO:
            splitter = _LineSplitter(name, send) if send and not errors_only else None
            if redirect_fds:
                _redirect(_FILENO[name], log.fileno(), getattr(sys, name), undo)
                stream: _LogStream | _TeeStream = _LogStream(
                    name, splitter, log_file, on_write_error
                )
            else:
                stream = _TeeStream(name, getattr(sys, name), log, splitter, on_write_error)
            undo.callback(setattr, sys, name, getattr(sys, name))
            undo.callback(stream.stop_capture)
            setattr(sys, name, stream)
        if send:
            undo.enter_context(_forward_error_records(send))
        yield


@contextmanager
def _forward_native_output(path: Path, send: SendLine) -> Iterator[LogFile]:
    """Send lines that C code and child processes write to the log."""
    splitter = _LineSplitter("stderr", send)
    with LogFile(path, splitter.feed) as log:
        yield log
    splitter.finish()


def _make_write_error_handler(path: Path, send: SendLine | None) -> OnWriteError:
    """Return a handler for log write errors that sends only the first one.

    The user's `print` does not raise these errors: a full log disk must not end training.
    """
    fork_count, has_warned = _threads.fork_count, False

    def on_write_error(error: OSError) -> None:
        nonlocal has_warned
        if send is None or has_warned or _threads.fork_count != fork_count:
            return
        has_warned = True
        text = f"Output is missing from {path} from this point on: {error}"
        send(OutputLine(text=text, stream="stderr"))

    return on_write_error


def _redirect(fd: int, log: int, stream: TextIO, undo: ExitStack) -> None:
    """Redirect `fd` to the log and flush `stream` at the right times."""
    # Flush before the descriptor changes: buffered text belongs to the previous target.
    stream.flush()
    flush_c_stdout()
    # Callbacks run in reverse order: buffered text is flushed to the log, then `fd` is restored.
    saved_fd = os.dup(fd)
    undo.callback(os.close, saved_fd)
    undo.callback(os.dup2, saved_fd, fd)
    undo.callback(stream.flush)
    undo.callback(flush_c_stdout)
    os.dup2(log, fd)


class _LogStream(io.TextIOWrapper):
    """Unbuffered text stream on descriptor 1 or 2 that also passes its text to `_LineSplitter`.

    A library's logging handler may keep this stream after the capture ends. The stream then
    forwards text to the current `sys.stdout` or `sys.stderr`, such as the next capture's stream.
    """

    def __init__(
        self,
        name: StreamName,
        splitter: _LineSplitter | None,
        log: LogFile | None,
        on_write_error: OnWriteError,
    ) -> None:
        # Unbuffered, so that output printed before a SIGKILL is in the log.
        raw = io.FileIO(_FILENO[name], "wb", closefd=False)
        super().__init__(
            cast(io.BufferedWriter, raw),
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        self._stream_name = name
        self._splitter = splitter
        self._log = log
        self._on_write_error = on_write_error
        self._is_retired = False

    def write(self, text: str, /) -> int:
        """Write to the log immediately and, outside of forked children, send complete lines."""
        if self._is_retired and (current := getattr(sys, self._stream_name)) is not self:
            return cast(int, current.write(text))
        log, data = self._log, text.encode("utf-8", "backslashreplace")
        try:
            if log is None or not log.write(data):
                # Bypass this stream's own buffer, which would retry the write at each flush.
                self.buffer.write(data)
                return len(text)
        except OSError as error:
            self._on_write_error(error)
        if self._splitter:
            self._splitter.feed(text)
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Write to the log without sending lines."""
        if self._log is None or not self._log.write(data):
            self.buffer.write(data)

    def close(self) -> None:
        """Do nothing: like the standard streams, this stream stays open until the process ends."""

    def stop_capture(self) -> None:
        self._is_retired, self._log = True, None
        if self._splitter:
            self._splitter.finish()


def write_to_log(data: bytes, log: io.FileIO) -> None:
    """Write to the log of a rank without sending lines.

    Args:
        data: Output to write.
        log: Log of the rank.
    """
    if isinstance(sys.stdout, _LogStream):
        # The output of this process goes to the same log. Other bytes in it would be sent as lines.
        sys.stdout.write_bytes(data)
    else:
        log.write(data)


class _TeeStream(LoggedStream):
    """Proxy of the user's stream that also writes to the log."""

    def __init__(
        self,
        name: StreamName,
        original: TextIO,
        log: io.FileIO,
        splitter: _LineSplitter | None,
        on_write_error: OnWriteError,
    ) -> None:
        self._stream_name = name
        self.stream_without_log = original
        self._log: io.FileIO | None = log
        self._splitter = splitter
        self._on_write_error = on_write_error

    def write(self, text: str) -> int:
        current = getattr(sys, self._stream_name)
        if self._log is None and current is not self:
            return cast(int, current.write(text))
        written = self.stream_without_log.write(text)
        if self._log is not None:
            try:
                self._log.write(text.encode("utf-8", "backslashreplace"))
            except ValueError:  # the capture has just ended and closed the log
                pass
            except OSError as error:
                self._on_write_error(error)
        if self._splitter:
            self._splitter.feed(text)
        return written

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream_without_log, name)

    def stop_capture(self) -> None:
        self._log = None
        if self._splitter:
            self._splitter.finish()


class _LineSplitter(LineSplitter):
    """Line splitter that does nothing in a forked child, where its lock may be held forever."""

    def __init__(self, stream: StreamName, send: SendLine) -> None:
        super().__init__(stream, send)
        self._fork_count = _threads.fork_count

    def feed(self, text: str) -> None:
        if _threads.fork_count == self._fork_count:
            super().feed(text)

    def finish(self) -> None:
        if _threads.fork_count == self._fork_count:
            super().finish()


@contextmanager
def _forward_error_records(send: SendLine) -> Iterator[None]:
    """Send each log record of level ERROR and above from any logger.

    The log record factory (`logging.setLogRecordFactory`) sees all records. A handler on the root
    logger would miss loggers that do not propagate (Transformers, Lightning), and would turn the
    user's `logging.basicConfig()` into a no-op.
    """
    # Wrap the current factory instead of Python's default: a library may have installed its own.
    make_record = logging.getLogRecordFactory()
    format_error = logging.Formatter("%(levelname)s %(name)s: %(message)s").format
    pid = os.getpid()

    def make_and_send(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        level = record.levelno or 0  # logging.makeLogRecord() starts without a level
        if level >= logging.ERROR and os.getpid() == pid and not ended:
            for line in _format_record(record).split("\n"):
                send(OutputLine(text=line, stream="stderr", is_log_record=True))
        return record

    def _format_record(record: logging.LogRecord) -> str:
        try:
            return format_error(record)
        except Exception:  # arguments do not match the message: logging reports it on stderr
            return f"{record.levelname} {record.name}: {record.msg}"

    ended = False
    logging.setLogRecordFactory(make_and_send)
    try:
        yield
    finally:
        ended = True  # in case the user's factory wraps this one
        if logging.getLogRecordFactory() is make_and_send:
            logging.setLogRecordFactory(make_record)
