"""Run checksums, deletions, and uploads in a low-priority background thread."""

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
"""Time that the end of a run waits for background tasks before it emits a notice."""

_logger = logging.getLogger("drawbar.train")


class BackgroundTasks:
    """Run tasks one after the other on a low-priority thread. Must be used on the event loop."""

    def __init__(self) -> None:
        # Use a single thread, so that a checkpoint is never hashed while it is being deleted.
        self._thread = DaemonThreadPool(1, "drawbar-background", _lower_thread_priority)
        self._running: set[asyncio.Future[None]] = set()
        self._should_stop_waiting = False

    def submit(self, action: Callable[..., object], *arguments: object) -> None:
        """Queue a call. Its exceptions are logged."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, run_and_log_errors, action, *arguments)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def stop_waiting(self) -> None:
        """Cancel queued calls and make `close()` return without waiting for the running one."""
        self._should_stop_waiting = True
        for future in list(self._running):
            future.cancel()

    async def close(self, emit: Emit) -> None:
        """Wait until all calls have ended or are cancelled.

        Args:
            emit: Receives a notice if this takes longer than `CLOSE_NOTICE_S`.
        """
        if self._running:
            _, unfinished = await asyncio.wait(self._running, timeout=CLOSE_NOTICE_S)
            if unfinished:
                emit(Notice(_CLOSE_NOTICE))
                await asyncio.wait(unfinished)
        self._thread.shutdown(wait=not self._should_stop_waiting, cancel_futures=True)


_CLOSE_NOTICE = (
    "Training has ended. Waiting for checksums and deletions of checkpoints. This takes as long as "
    "reading the checkpoints. To skip it, call stop() or press Ctrl-C."
)


def run_and_log_errors(action: Callable[..., object], *arguments: object) -> None:
    """Call a function and log its exceptions as warnings."""
    try:
        action(*arguments)
    except Exception as error:  # fsspec filesystems raise the exceptions of their libraries
        _logger.warning("%s", error)


def _lower_thread_priority() -> None:
    """Lower the priority of this thread, so that hashing does not slow commits and training."""
    if sys.platform != "linux":
        return  # on other systems this would affect the entire process
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
