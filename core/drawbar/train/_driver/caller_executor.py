"""Run functions in the thread that waits for the run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

Call = Callable[[], None]


class CallerExecutor:
    """Executor of functions that a run calls in this process, mainly the training function.

    Args:
        use_caller_thread: Run functions in the thread that waits for the run, where `pdb` works and
            Ctrl-C arrives, instead of a new thread for each.
    """

    def __init__(self, *, use_caller_thread: bool) -> None:
        self._use_caller_thread = use_caller_thread
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()

    def submit(self, call: Call) -> None:
        """Submit a function."""
        if self._use_caller_thread:
            self._queue.put(call)
        else:
            threading.Thread(target=call, name="drawbar-function", daemon=True).start()

    def run_until(self, ended: threading.Event, timeout: float | None) -> bool:
        """Run functions until `ended` is set or the timeout expires. Return whether it is set."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ended.is_set():
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                call = self._queue.get(timeout=remaining)
            except queue.Empty:
                return False
            if call is None:
                self.wake_up()  # other waiting threads
            else:
                call()
        return True

    def wake_up(self) -> None:
        """Make waiting threads check whether the run has ended."""
        self._queue.put(None)
