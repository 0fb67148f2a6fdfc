"""What no checkpoint depends on, and no rank waits for: hashes, deletions, copies elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable

from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import Notice
from drawbar.train._threads import DaemonThreadPool

CLOSE_NOTICE_S = 5.0
"""How long the end of a run may be held up before that is said."""

_logger = logging.getLogger("drawbar.train")


class BackgroundTasks:
    """Does such things on a thread of low priority, one after the other. For the event loop."""

    def __init__(self) -> None:
        # One thread: a checkpoint is hashed before it is deleted, never while it is.
        self._thread = DaemonThreadPool(1, "drawbar-later", _lower_thread_priority)
        self._running: set[asyncio.Future[None]] = set()
        self._should_stop_waiting = False

    def submit(self, action: Callable[..., object], *arguments: object) -> None:
        """Have it done when its turn comes; what it raises is logged."""
        loop = asyncio.get_running_loop()
        later = loop.run_in_executor(self._thread, run_and_log_errors, action, *arguments)
        self._running.add(later)
        later.add_done_callback(self._running.discard)

    def stop_waiting(self) -> None:
        """Have `close` wait no longer; what is being done goes on, if the process does."""
        self._should_stop_waiting = True
        for each in list(self._running):
            each.cancel()

    async def close(self, emit: Emit) -> None:
        """Wait until all of it is done or given up, and say so if that takes long."""
        if self._running:
            _, left = await asyncio.wait(self._running, timeout=CLOSE_NOTICE_S)
            if left:
                emit(Notice(_CLOSE_NOTICE))
                await asyncio.wait(left)
        self._thread.shutdown(wait=not self._should_stop_waiting, cancel_futures=True)


_CLOSE_NOTICE = (
    "the training is over, but not all checksums of its checkpoints are there yet, nor all "
    "deletions done: that takes as long as reading them. stop() or Ctrl-C leaves out what is left"
)


def run_and_log_errors(action: Callable[..., object], *arguments: object) -> None:
    """Do something whose failure is only logged."""
    try:
        action(*arguments)
    except Exception as error:  # fsspec's filesystems raise what their libraries do
        _logger.warning("%s", error)


def _lower_thread_priority() -> None:
    """Give this thread a low priority: hashing must not slow the commits and the training."""
    if sys.platform != "linux":
        return  # elsewhere it would be the whole process
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
