"""Capture the output of a worker in a log and send lines to the driver.

The log contains every byte that this process, its children, and C++ libraries write. The driver
receives lines, including stderr lines of children and libraries. Progress bars that redraw a line
in place (tqdm) would send thousands of lines, so their states are sent a few times per second and
marked as transient. Ranks above 0 send only log records of level ERROR and above.

File descriptors 1 and 2 of the process are redirected to the log, so output is saved even if the
process dies. Python's text is written through a third descriptor, whose position is then the end of
that text. All other bytes in the log are from C code or child processes. `LogFile` passes them to a
callback before Python's next text, or after at most 0.25 s.
"""

from __future__ import annotations

import codecs
import ctypes
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

from drawbar._process import threads as _threads
from drawbar._process.output_lines import LineSplitter, LoggedStream, OutputLine, StreamName

SendLine = Callable[[OutputLine], None]
GetLogSize = Callable[[], int]
OnWriteError = Callable[[OSError], None]
_FILENO: dict[StreamName, int] = {"stdout": 1, "stderr": 2}
LOG_POLL_S = 0.25
MAX_FORWARDED_BYTES = 16 * 1024
"""Maximum number of bytes that are forwarded between two polls. The log contains all bytes."""


@contextmanager
def capture_output(log_path: Path, send: SendLine, *, errors_only: bool) -> Iterator[GetLogSize]:
    """Redirect the output of this process to a log and send lines to the driver.

    File descriptors 1 and 2 are redirected too, so output of children and C++ libraries is
    captured. On exit, also after an exception, the streams, file descriptors, and log record
    factory are restored, and an unfinished last line is sent. If the log cannot be written, for
    example because the disk is full, lines are still sent.

    Args:
        log_path: Log file, opened for appending. Its directory is created.
        send: Receives each line for the driver's console. It is called in the printing thread, or,
            for output of C code and children, in a separate thread; never in a forked child.
        errors_only: Do not send printed lines. Log records of level ERROR and above are always
            sent, and are marked, because the console may show them instead of printed lines.

    Yields:
        Function that returns the size of the log in bytes; 0 after the end.

    Raises:
        OSError: The log cannot be created.
    """
    # Streams are restored in reverse order, so that none writes to a closed log.
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undo:
        log = undo.enter_context(open(log_path, "ab", buffering=0))
        on_write_error = _make_write_error_handler(log_path, send)
        log_file = None
        if not errors_only:
            log_file = undo.enter_context(_forward_native_output(log_path, send))
        for name in _FILENO:
            splitter = None if errors_only else _LineSplitter(name, send)
            _redirect(_FILENO[name], log.fileno(), getattr(sys, name), undo)
            _replace_stream(name, _LogStream(name, splitter, log_file, on_write_error), undo)
        undo.enter_context(_forward_error_records(send))
        yield partial(_get_log_size, log, log_file)


@contextmanager
def tee_output(log_path: Path) -> Iterator[GetLogSize]:
    """Write the output of Python code to its previous target and to a log.

    `pdb` and `input()` keep working. On exit, also after an exception, the streams are restored.
    Errors of writing to the log are ignored.

    Args:
        log_path: Log file, opened for appending. Its directory is created.

    Yields:
        Function that returns the size of the log in bytes; 0 after the end.

    Raises:
        OSError: The log cannot be created.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with open(log_path, "ab", buffering=0) as log, ExitStack() as undo:
        for name in _FILENO:
            _replace_stream(name, _TeeStream(name, getattr(sys, name), log), undo)
        yield partial(_get_log_size, log)


def _get_log_size(log: io.FileIO, log_file: LogFile | None = None) -> int:
    """Return the end of the last output in the log, without a call of the filesystem.

    The filesystem may not respond, and a rank must be able to send its stack nevertheless. With
    O_APPEND, the position of the descriptor is the end of the last text that was written to it,
    also by C code and child processes.
    """
    try:
        size = log.seek(0, os.SEEK_CUR)
    except ValueError:  # closed
        return 0
    return size if log_file is None else max(size, log_file.forwarded_size)


def _replace_stream(name: StreamName, stream: _LogStream | _TeeStream, undo: ExitStack) -> None:
    undo.callback(setattr, sys, name, getattr(sys, name))
    undo.callback(stream.stop_capture)
    setattr(sys, name, stream)


@contextmanager
def _forward_native_output(path: Path, send: SendLine) -> Iterator[LogFile]:
    """Send lines that C code and child processes write to the log."""
    splitter = _LineSplitter("stderr", send)
    with LogFile(path, splitter.feed) as log:
        yield log
    splitter.finish()


def _make_write_error_handler(path: Path, send: SendLine) -> OnWriteError:
    """Return a handler for log write errors that sends only the first one.

    The user's `print` does not raise these errors: a full log disk must not end training.
    """
    fork_count, has_warned = _threads.fork_count, False

    def on_write_error(error: OSError) -> None:
        nonlocal has_warned
        if has_warned or _threads.fork_count != fork_count:
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
    ) -> None:
        self._stream_name = name
        self.stream_without_log = original
        self._log: io.FileIO | None = log

    def write(self, text: str) -> int:
        current = getattr(sys, self._stream_name)
        if self._log is None and current is not self:
            return cast(int, current.write(text))
        written = self.stream_without_log.write(text)
        if self._log is not None:
            # The disk may be full, or the capture may have just ended and closed the log.
            with suppress(OSError, ValueError):
                self._log.write(text.encode("utf-8", "backslashreplace"))
        return written

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream_without_log, name)

    def stop_capture(self) -> None:
        self._log = None


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


class LogFile:
    """Log of a rank, to which Python, C code, and child processes append.

    Use it as a context manager. In the `with` block, a thread polls the log for text of C code and
    child processes. At the end of the block, the remaining text is forwarded.

    Args:
        path: Log file. It must exist.
        on_text: Receives the text of C code and child processes in chunks.
    """

    def __init__(self, path: Path, on_text: Callable[[str], None]) -> None:
        self._path = path
        self._on_text = on_text
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._fork_count = _threads.fork_count
        self._forwarded_size = os.fstat(self._fd).st_size  # text from before is not forwarded
        self._lock = threading.RLock()  # a signal handler may print while its thread prints
        self._decode = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode
        self._remaining_bytes = MAX_FORWARDED_BYTES
        self._skipped_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll_loop, name="drawbar-log", daemon=True)

    def __enter__(self) -> LogFile:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # In a forked child, the thread does not run, and the lock may be held forever.
        if _threads.fork_count != self._fork_count:
            return
        self._ended.set()
        self._thread.join()
        # Forward output since the last poll of the thread.
        self._poll()
        with self._lock:
            os.close(self._fd)
            self._fd = -1

    @property
    def forwarded_size(self) -> int:
        """Position up to which the log was forwarded."""
        return self._forwarded_size

    def write(self, data: bytes) -> bool:
        """Append Python's text, and forward the text of C code and child processes before it.

        Returns:
            False if nothing was written: in a forked child, or after the end of the `with` block.
        """
        # A forked child shares the position of the descriptor with its parent.
        if _threads.fork_count != self._fork_count:
            return False
        with self._lock:
            if self._fd < 0:
                return False
            written = os.write(self._fd, data)
            # With O_APPEND, the position is the end of this text, even if other processes have
            # appended text concurrently.
            end = os.lseek(self._fd, 0, os.SEEK_CUR)
            if end - written != self._forwarded_size:
                self._forward_until(end - written)
            self._forwarded_size = end
        return True

    def _poll_loop(self) -> None:
        while not self._ended.wait(LOG_POLL_S):
            flush_c_stdout()
            self._poll()

    def _poll(self) -> None:
        with self._lock:
            size = os.fstat(self._fd).st_size
            if size != self._forwarded_size:
                self._forward_until(size)
                self._forwarded_size = size
            if self._skipped_bytes:
                self._on_text(f"\n({self._skipped_bytes} more bytes are in {self._path})\n")
            self._remaining_bytes, self._skipped_bytes = MAX_FORWARDED_BYTES, 0

    def _forward_until(self, end: int) -> None:
        """Forward the text before position `end` that has not been forwarded."""
        length = max(end - self._forwarded_size, 0)  # negative if the log was truncated
        shown = min(length, self._remaining_bytes)
        self._remaining_bytes -= shown
        self._skipped_bytes += length - shown
        if shown:
            self._on_text(self._decode(os.pread(self._fd, shown, self._forwarded_size)))


def flush_c_stdout() -> None:
    """Flush C's stdout, which the C library fully buffers if it is redirected to a file."""
    libc = ctypes.CDLL(None)
    with suppress(ValueError):  # macOS calls this symbol __stdoutp
        libc.fflush(ctypes.c_void_p.in_dll(libc, "stdout"))
