"""Jobs of a run in this process, for the thread that waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

Call = Callable[[], None]


class CallerExecutor:
    """What a run has to do in this process: above all, the training function itself.

    Args:
        wait: Jobs wait for the thread that waits for the run, where `pdb` works and Ctrl-C arrives.
            Otherwise each has a thread of its own.
    """

    def __init__(self, *, use_caller_thread: bool) -> None:
        self._wait = use_caller_thread
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()

    def submit(self, job: Call) -> None:
        """Have a job done."""
        if self._wait:
            self._queue.put(job)
        else:
            threading.Thread(target=job, name="drawbar-function", daemon=True).start()

    def run_until(self, ended: threading.Event, timeout: float | None) -> bool:
        """Do jobs as they come until it is over, or so many seconds; tells whether it is."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ended.is_set():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                job = self._queue.get(timeout=left)
            except queue.Empty:
                return False
            if job is None:
                self.wake_up()  # whoever waits besides
            else:
                job()
        return True

    def wake_up(self) -> None:
        """Have those who wait look whether it is over."""
        self._queue.put(None)
