"""What no checkpoint depends on, and no rank waits for: hashes, deletions, copies elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable

from drawbar.train._history.events import Notice
from drawbar.train._history.stream import Emit
from drawbar.train._threads import DaemonThreads

SILENT_SECONDS = 5.0
"""How long the end of a run may be held up before that is said."""

_logger = logging.getLogger("drawbar.train")


class Later:
    """Does such things on a thread of low priority, one after the other. For the event loop."""

    def __init__(self) -> None:
        # One thread: a checkpoint is hashed before it is deleted, never while it is.
        self._thread = DaemonThreads(1, "drawbar-later", _yield_to_others)
        self._under_way: set[asyncio.Future[None]] = set()
        self._gave_up = False

    def do(self, action: Callable[..., object], *arguments: object) -> None:
        """Have it done when its turn comes; what it raises is logged."""
        loop = asyncio.get_running_loop()
        later = loop.run_in_executor(self._thread, logged, action, *arguments)
        self._under_way.add(later)
        later.add_done_callback(self._under_way.discard)

    def give_up(self) -> None:
        """Have `close` wait no longer; what is being done goes on, if the process does."""
        self._gave_up = True
        for each in list(self._under_way):
            each.cancel()

    async def close(self, emit: Emit) -> None:
        """Wait until all of it is done or given up, and say so if that takes long."""
        if self._under_way:
            _, left = await asyncio.wait(self._under_way, timeout=SILENT_SECONDS)
            if left:
                emit(Notice(_HELD_UP))
                await asyncio.wait(left)
        self._thread.shutdown(wait=not self._gave_up, cancel_futures=True)


_HELD_UP = (
    "the training is over, but not all checksums of its checkpoints are there yet, nor all "
    "deletions done: that takes as long as reading them. stop() or Ctrl-C leaves out what is left"
)


def logged(action: Callable[..., object], *arguments: object) -> None:
    """Do something whose failure is only logged."""
    try:
        action(*arguments)
    except Exception as error:  # fsspec's filesystems raise what their libraries do
        _logger.warning("%s", error)


def _yield_to_others() -> None:
    """Give this thread a low priority: hashing must not slow the commits and the training."""
    if sys.platform != "linux":
        return  # elsewhere it would be the whole process
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
