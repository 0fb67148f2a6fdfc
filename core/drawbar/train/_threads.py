"""Threads that work until the process is gone.

Python's own pools, and `asyncio.to_thread` with them, refuse work as soon as the main thread has
ended. A run may go on then: in another thread that is in `fit()`, or until the end of the program
has stopped it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar, TypeVarTuple

P = ParamSpec("P")
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

ACCEPT_RETRY_SECONDS = 0.2

_logger = logging.getLogger("drawbar.train")


async def run_in_daemon_thread(function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """Await what a function gives that runs in a thread of its own.

    If this is cancelled, the function goes on, and nobody waits for it: neither the loop's end nor
    Python's, which both wait for `asyncio.to_thread`.
    """
    import asyncio  # 40 ms: who has no event loop, such as a command that reads of runs, needs none

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function(*arguments))
        except BaseException as error:
            outcome.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(ended.set)

    # One thread for each call: in a pool, calls that hang would use up its threads.
    threading.Thread(target=call, name="drawbar-call", daemon=True).start()
    await ended.wait()
    return outcome.result()


class _WorkItem(NamedTuple):
    """What a thread is to do, and how that is called off."""

    run: Callable[[], None]
    cancel: Callable[[], bool]


class DaemonThreadPool(Executor):
    """A pool of threads that Python's end neither waits for nor keeps from working.

    Args:
        most: How many threads there are at the same time.
        name: Of the threads.
        initializer: Called first in each thread.
    """

    def __init__(
        self, max_workers: int, thread_name: str, initializer: Callable[[], object] | None = None
    ) -> None:
        self._most = max_workers
        self._name = thread_name
        self._initializer = initializer
        self._calls = queue.SimpleQueue[_WorkItem | None]()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a thread call a function.

        Raises:
            RuntimeError: The pool is shut down.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads {self._name} are shut down")
            make = partial(_run_call, future, partial(fn, *args, **kwargs))
            self._calls.put(_WorkItem(make, future.cancel))
            if len(self._threads) < self._most:
                thread = threading.Thread(target=self._run_items, name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; wait until the given ones have been made, or cancel them."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                self._cancel_queued()
            for _ in self._threads:
                self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _cancel_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    call.cancel()

    def _run_items(self) -> None:
        if self._initializer is not None:
            self._initializer()
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # what it was given is held no longer than it lasts


def _run_call(future: Future[T], action: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)


def wait_to_accept_again(error: OSError, closed: threading.Event) -> None:
    """Wait before a listening thread calls `accept()` again, unless its socket is closed.

    Without the wait, the thread would use a whole core as long as no file descriptor is free.
    """
    if not closed.is_set():
        _logger.debug("a connection cannot be accepted and is retried: %s", error)
        closed.wait(ACCEPT_RETRY_SECONDS)
