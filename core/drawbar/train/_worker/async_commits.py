"""Checkpoints that a rank has reported and does not wait for: followed in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from drawbar.train._messages import Message, Offer, WaitsForCheckpoint
from drawbar.train._threads import DaemonThreadPool

MAX_CHECKPOINTS_IN_FLIGHT = 2


class AsyncCommits:
    """The asynchronous checkpoints of one rank that are not committed yet.

    Args:
        follow: Sees one through: persists this rank's share, and waits for the commit.
        say: Tells the controller something.
    """

    def __init__(
        self, complete: Callable[[int, Offer], None], say: Callable[[Message], None]
    ) -> None:
        self._follow = complete
        self._say = say
        self._submit_lock = threading.Lock()  # threads that report checkpoints
        self._thread: DaemonThreadPool | None = None
        self._futures: list[tuple[int, Future[None]]] = []  # with the number of the report

    def submit(self, index: int, offer: Offer) -> None:
        """Follow one in another thread; waits for the oldest if too many are in flight."""
        with self._submit_lock:
            if self._thread is None:
                # One thread, so that commits are followed in the order of the reports.
                self._thread = DaemonThreadPool(1, "drawbar-checkpoint")
            while sum(not each.done() for _, each in self._futures) >= MAX_CHECKPOINTS_IN_FLIGHT:
                self._wait_for_oldest()
            self._futures.append((index, self._thread.submit(self._follow, index, offer)))

    def _wait_for_oldest(self) -> None:
        index, oldest = self._futures.pop(0)
        # Said only if it is true: the controller takes it as proof that this rank stands still.
        if not oldest.done():
            self._say(WaitsForCheckpoint(index=index))
        oldest.result()

    def flush(self) -> None:
        """Wait until all of them are committed; raise what went wrong with one."""
        while self._futures:
            self._wait_for_oldest()
        self.join()

    def drain(self, timeout: float) -> None:
        """Give them so long to be committed; what comes of it does not matter."""
        if self._futures and timeout:
            wait([each for _, each in self._futures], timeout=timeout)
        if self._thread is not None:
            # Not waited for: it may hang in a storage that does not answer.
            self._thread.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait until nothing is written any more: the next attempt gives the same names."""
        if self._thread is not None:
            self._thread.shutdown()
