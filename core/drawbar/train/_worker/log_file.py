"""The log of a rank whose output is shown, and what others than Python have written to it.

The descriptors 1 and 2 of the process point at the file, so that all arrives there whatever dies.
Python's text goes there by a descriptor of its own, whose position tells where it has landed. What
lies between was written by C code or a child process. It is handed on before the next text of
Python's, or a quarter of a second later.
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

from drawbar.train._worker import fork_counter

LOG_POLL_S = 0.25
MAX_FORWARDED_BYTES = 16 * 1024
"""How much of what others have written is handed on between two looks; the log has the rest."""


class LogFile:
    """Appends Python's text to a log, and hands on what others have written there.

    A context manager: a thread looks after it until the end, and hands on what is there by then.

    Args:
        path: The log, which others append to.
        feed: Takes the others' text, in pieces.
    """

    def __init__(self, path: Path, feed: Callable[[str], None]) -> None:
        self._path = path
        self._feed = feed
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._forks = fork_counter.count
        self._forwarded_size = os.fstat(self._fd).st_size  # what lies before is known
        self._lock = threading.RLock()  # a signal handler may print while this prints
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
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A child that was forked inside has no such thread, and shares the descriptor's position.
        if fork_counter.count != self._forks:
            return
        self._ended.set()
        self._thread.join()
        # What came after the thread's last look.
        self._poll()
        with self._lock:
            os.close(self._fd)
            self._fd = -1

    def write(self, data: bytes) -> bool:
        """Append what is Python's own; first hand on what others have written before it.

        Gives False in a forked child, which is one of the others, and after the end.
        """
        if fork_counter.count != self._forks:
            return False
        with self._lock:
            if self._fd < 0:
                return False
            written = os.write(self._fd, data)
            # With O_APPEND the position is where the text has landed, whoever has written
            # meanwhile.
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
                self._feed(f"\n({self._skipped_bytes} bytes more are in {self._path})\n")
            self._remaining_bytes, self._skipped_bytes = MAX_FORWARDED_BYTES, 0

    def _forward_until(self, end: int) -> None:
        """Hand on what lies between what was seen and `end`; less than nothing if it was cut."""
        length = max(end - self._forwarded_size, 0)
        shown = min(length, self._remaining_bytes)
        self._remaining_bytes -= shown
        self._skipped_bytes += length - shown
        if shown:
            self._feed(self._decode(os.pread(self._fd, shown, self._forwarded_size)))


def flush_c_stdout() -> None:
    """Have what C code has printed written: to a file, the C library writes whole blocks only."""
    libc = ctypes.CDLL(None)
    with suppress(ValueError):  # a C library that calls it otherwise
        libc.fflush(ctypes.c_void_p.in_dll(libc, "stdout"))
