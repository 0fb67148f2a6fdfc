"""Jobs of a run in this process, for the thread that waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

Job = Callable[[], None]


class Jobs:
    """What a run has to do in this process: above all, the training function itself.

    Args:
        wait: Jobs wait for the thread that waits for the run, where `pdb` works and Ctrl-C arrives.
            Otherwise each has a thread of its own.
    """

    def __init__(self, *, wait: bool) -> None:
        self._wait = wait
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

    def spawn(self, job: Job) -> None:
        """Have a job done."""
        if self._wait:
            self._waiting.put(job)
        else:
            threading.Thread(target=job, name="drawbar-function", daemon=True).start()

    def do_until(self, over: threading.Event, timeout: float | None) -> bool:
        """Do jobs as they come until it is over, or so many seconds; tells whether it is."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not over.is_set():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                job = self._waiting.get(timeout=left)
            except queue.Empty:
                return False
            if job is None:
                self.release()  # whoever waits besides
            else:
                job()
        return True

    def release(self) -> None:
        """Have those who wait look whether it is over."""
        self._waiting.put(None)
