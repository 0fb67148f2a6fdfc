"""What no checkpoint depends on, and no rank waits for: hashes, deletions, copies elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable

from drawbar.train._threads import DaemonThreads

_logger = logging.getLogger("drawbar.train")


class Later:
    """Does such things on a thread of low priority, one after the other. For the event loop."""

    def __init__(self) -> None:
        # One thread: a checkpoint is hashed before it is deleted, never while it is.
        self._thread = DaemonThreads(1, "drawbar-later", _yield_to_others)
        self._under_way: set[asyncio.Future[None]] = set()

    def do(self, action: Callable[..., object], *arguments: object) -> None:
        """Have it done when its turn comes; what it raises is logged."""
        loop = asyncio.get_running_loop()
        later = loop.run_in_executor(self._thread, logged, action, *arguments)
        self._under_way.add(later)
        later.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """Wait until all of it is done, and do no more."""
        if self._under_way:
            await asyncio.wait(self._under_way)
        self._thread.shutdown()


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
