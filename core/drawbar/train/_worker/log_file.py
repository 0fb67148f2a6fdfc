"""Append Python's text to a rank's log and forward the text that C code and child processes append.

File descriptors 1 and 2 of the process are redirected to the log, so output is saved even if the
process dies. Python's text is written through a third descriptor, whose position is then the end of
that text. All other bytes in the log are from C code or child processes. `LogFile` passes them to a
callback before Python's next text, or after at most 0.25 s.
"""

from __future__ import annotations

import codecs
import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from drawbar.train import _threads

LOG_POLL_S = 0.25
MAX_FORWARDED_BYTES = 16 * 1024
"""Maximum number of bytes that are forwarded between two polls. The log contains all bytes."""


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
