"""Daemon threads that keep working while the interpreter shuts down, and detection of forks.

The pools of `concurrent.futures`, and with them `asyncio.to_thread`, reject work when the main
thread has ended. A run may continue after that: in another thread that called `fit()`, or until the
shutdown of the interpreter has stopped the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
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
    """Call a function in a separate daemon thread and return its result.

    If the coroutine is cancelled, the function continues. Neither the event loop nor the
    interpreter waits for it when they shut down, unlike with `asyncio.to_thread`.
    """
    import asyncio  # takes 40 ms, which commands that only read runs should not pay

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function(*arguments))
        except BaseException as error:
            outcome.set_exception(error)
        with contextlib.suppress(RuntimeError):  # The loop is closed, so no caller waits.
            loop.call_soon_threadsafe(ended.set)

    # Use one thread per call: calls that hang would exhaust a pool.
    threading.Thread(target=call, name="drawbar-call", daemon=True).start()
    await ended.wait()
    return outcome.result()


class _WorkItem(NamedTuple):
    """A call for a thread, and how to cancel it."""

    run: Callable[[], None]
    cancel: Callable[[], bool]


class DaemonThreadPool(Executor):
    """Thread pool that keeps working during the interpreter's shutdown and does not delay it.

    Args:
        max_workers: Maximum number of threads.
        thread_name: Name of the threads.
        initializer: Function that each thread calls first.
    """

    def __init__(
        self, max_workers: int, thread_name: str, initializer: Callable[[], object] | None = None
    ) -> None:
        self._max_workers = max_workers
        self._name = thread_name
        self._initializer = initializer
        self._calls = queue.SimpleQueue[_WorkItem | None]()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Schedule a function call.

        Args:
            fn: Function to call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            A future for the result.

        Raises:
            RuntimeError: The pool has been shut down.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the thread pool {self._name} has been shut down")
            run = partial(_run_call, future, partial(fn, *args, **kwargs))
            self._calls.put(_WorkItem(run, future.cancel))
            if len(self._threads) < self._max_workers:
                thread = threading.Thread(target=self._run_items, name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Reject new calls, and wait for scheduled calls or cancel them.

        Args:
            wait: Whether to wait until the threads have ended.
            cancel_futures: Whether to cancel calls that have not started.
        """
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
            del call  # Do not keep its arguments alive while waiting for the next call.


def _run_call(future: Future[T], action: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)


def wait_to_accept_again(error: Exception, closed: threading.Event) -> None:
    """Wait before a listening thread calls `accept()` again, unless its socket is closed.

    Without the wait, the thread would use a whole core as long as no file descriptor is free.
    """
    if not closed.is_set():
        _logger.debug("a connection cannot be accepted and is retried: %s", error)
        closed.wait(ACCEPT_RETRY_SECONDS)


fork_count = 0
"""Number of forks between the first process that imported this module and this one.

An object that stores the count of its creation can detect that it is a copy in a child process.
`os.getpid()` would work too, but is a system call, which may cost more than the rest of a
`report()` or `print()`.
"""


def _increase_fork_count() -> None:
    global fork_count
    fork_count += 1


os.register_at_fork(after_in_child=_increase_fork_count)
