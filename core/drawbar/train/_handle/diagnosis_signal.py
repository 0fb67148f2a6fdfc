"""Print a diagnosis of a run when a process receives SIGUSR1."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def diagnose_on_signal(diagnose: Callable[[], str]) -> Iterator[None]:
    """Call `diagnose` when this process receives SIGUSR1, unless the signal has a handler."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        yield
        return
    # In a thread: the handler runs between two lines of the main thread, which may hold a lock
    # that `diagnose` needs.
    signal.signal(signal.SIGUSR1, lambda number, frame: threading.Thread(target=diagnose).start())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
