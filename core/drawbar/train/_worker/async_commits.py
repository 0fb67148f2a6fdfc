"""Complete asynchronous checkpoints in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

from drawbar._process.threads import DaemonThreadPool
from drawbar._recovery.decisions import get_storing_limit
from drawbar._storage.contents import FileEntry
from drawbar.train._protocol.messages import CheckpointOffer, CheckpointWaitStarted, Message

MAX_CHECKPOINTS_IN_FLIGHT = 2


class AsyncCommits:
    """Asynchronous checkpoints of one rank that are not committed yet.

    Args:
        complete: Persists this rank's assigned files of a report and waits for the commit.
        send: Callback that sends messages to the controller.
    """

    def __init__(
        self, complete: Callable[[int, CheckpointOffer], None], send: Callable[[Message], None]
    ) -> None:
        self._complete = complete
        self._send = send
        self._submit_lock = threading.Lock()  # several threads may report checkpoints
        self._thread: DaemonThreadPool | None = None
        self._futures: list[tuple[int, Future[None]]] = []  # with the report index
        self._storing: dict[Future[None], float] = {}  # with the time limit in seconds

    def submit(self, report_index: int, offer: CheckpointOffer) -> None:
        """Complete a checkpoint in the background; block while too many are in flight."""
        with self._submit_lock:
            if self._thread is None:
                # A single thread, so that commits complete in the order of the reports.
                self._thread = DaemonThreadPool(1, "drawbar-checkpoint")
            while (
                sum(not future.done() for _, future in self._futures) >= MAX_CHECKPOINTS_IN_FLIGHT
            ):
                self._wait_for_oldest()
            future = self._thread.submit(self._complete, report_index, offer)
            self._futures.append((report_index, future))

    def _wait_for_oldest(self) -> None:
        report_index, future = self._futures.pop(0)
        # Send only if this thread will block: the controller takes it as proof that the rank waits.
        if not future.done():
            self._send(CheckpointWaitStarted(report_index=report_index))
        future.result()

    def raise_error(self) -> None:
        """Raise the error of a checkpoint that could not be committed."""
        # Without waiting: another thread may hold the lock while too many are in flight.
        if not self._futures or not self._submit_lock.acquire(blocking=False):
            return
        try:
            for entry in [entry for entry in self._futures if entry[1].done()]:
                self._futures.remove(entry)
                entry[1].result()
        finally:
            self._submit_lock.release()

    def flush(self) -> None:
        """Wait until all checkpoints are committed and raise the first error."""
        while self._futures:
            self._wait_for_oldest()
        self.join()

    @contextmanager
    def storing(self, files: Collection[FileEntry]) -> Iterator[None]:
        """Let `drain` wait while this rank stores files of a checkpoint."""
        stored = Future[None]()
        self._storing[stored] = get_storing_limit(files)
        try:
            yield
        finally:
            del self._storing[stored]
            stored.set_result(None)

    def drain(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for commits, ignore errors, and cancel the rest.

        If this rank is storing files then, wait for them, too, with a limit that their size
        determines: the other ranks may have stored theirs.
        """
        if timeout:
            wait([future for _, future in self._futures], timeout=timeout)
            storing = dict(self._storing)
            wait(storing, timeout=max(storing.values(), default=0.0))
        if self._thread is not None:
            # Do not wait for the thread: it may hang in an unresponsive storage.
            self._thread.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for the background thread: the next attempt uses the same checkpoint names."""
        if self._thread is not None:
            self._thread.shutdown()
