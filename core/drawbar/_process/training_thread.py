"""Interrupt the thread of a training function, and check which threads may report.

A forked child (a DataLoader worker, multiprocessing) has a copy of the session, but its messages
are not received. Threads that an earlier attempt left behind must not report either. Because the
k-th reports and the k-th collectives of all ranks belong together, each rank of a group with
several workers must call them from one thread. Otherwise their order would be undefined.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from typing import NoReturn
from weakref import WeakSet

from drawbar._process import threads as _threads
from drawbar._process.ranks import Ranks


class AttemptInterrupted(BaseException):
    """Raised in the training function when the controller ends the attempt.

    A `BaseException`, like `KeyboardInterrupt`, so that `except Exception` in user code does not
    catch it.
    """


class InterruptScope:
    """Section of a thread in which user code can be interrupted, from `begin()` to `end()`.

    A late interrupt has no effect, so it does not disturb what the thread does afterwards, such as
    sending the failure of the user code.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._is_requested = False
        self._is_sent = False
        self._has_raised = False

    def begin(self) -> None:
        """Allow interrupts of the calling thread.

        Raises:
            AttemptInterrupted: An interrupt was requested before this call.
        """
        with self._lock:
            self._thread = threading.get_ident()
            # An interrupt during the setup of this thread is not sent a second time.
            is_requested = self._is_requested
        if is_requested:
            raise AttemptInterrupted

    def interrupt(self) -> None:
        """Raise `AttemptInterrupted` in the thread, at its next Python instruction."""
        with self._lock:
            self._is_requested = True
            if self._thread is not None and not self._has_raised:
                # With the lock: the thread must not leave the user code between the check and the
                # exception.
                self._is_sent = True
                _raise_in_thread(self._thread)

    def raise_interrupt(self, reason: str) -> NoReturn:
        """Raise `AttemptInterrupted` in the calling thread.

        The thread of the user code receives it only once: a second exception would abort the
        handling of the first one, such as a `finally` block that saves a file.
        """
        with self._lock:
            is_user_thread = self._thread == threading.get_ident()
            self._has_raised |= is_user_thread
            is_sent = is_user_thread and self._is_sent
        if is_sent:
            _discard_pending_exception()
        raise AttemptInterrupted(reason)

    def end(self) -> None:
        """Disallow interrupts and discard a pending one.

        Raises:
            AttemptInterrupted: An interrupt arrived during this call. No other one follows.
        """
        with self._lock:
            self._thread = None
            is_sent = self._is_sent
        if is_sent:
            _discard_pending_exception()


THREAD_START_TIMEOUT_S = 1.0


def _raise_in_thread(thread: int) -> None:
    """Raise `AttemptInterrupted` in the thread with this id.

    Before Python 3.12, a thread that is being started has the id of the thread that starts it. It
    would receive the exception instead and die, and the starting thread would wait for it forever.
    So wait until no thread is being started. Only threads of `threading` are detected (`_limbo`).
    """
    if sys.version_info >= (3, 12):
        _set_async_exception(thread, AttemptInterrupted)
        return
    lock, starting_threads = vars(threading)["_active_limbo_lock"], vars(threading)["_limbo"]
    deadline = time.monotonic() + THREAD_START_TIMEOUT_S  # failed starts may stay in _limbo
    while True:
        with lock:
            if not starting_threads or time.monotonic() > deadline:
                _set_async_exception(thread, AttemptInterrupted)
                return
        time.sleep(0)  # let the thread start


def _discard_pending_exception() -> None:
    """Discard a pending exception of this thread by replacing it with one that is caught here.

    Clearing it instead would leave Python 3.11 with an unhandled pending call: in a traced thread
    (debugger, coverage, cProfile), no function would start again.
    """
    try:
        _set_async_exception(threading.get_ident(), AttemptInterrupted)
        while True:
            pass
    except AttemptInterrupted:
        pass


def _set_async_exception(thread: int, exception: type[BaseException]) -> None:
    identity = ctypes.c_ulong(thread)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(exception))


class ThreadGuard:
    """Checks the callers of `report()` and related functions, for one rank in one attempt."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank = ranks.world_rank
        self._is_single_worker = ranks.world_size == 1
        self._pid = os.getpid()
        self._fork_count = _threads.fork_count
        self._function_thread_id = threading.get_ident()
        self._foreign_threads = WeakSet[threading.Thread]()
        self._reporting_thread: threading.Thread | None = None

    def start(self) -> None:
        """Record the calling thread as the function's thread and all other threads as foreign."""
        self._function_thread_id = threading.get_ident()
        # Only at the start: threads that start later belong to the attempt.
        self._foreign_threads.update(threading.enumerate())
        self._foreign_threads.discard(threading.current_thread())

    def check_caller(self, function_name: str) -> None:
        """Check that this process and this thread belong to the attempt.

        Raises:
            RuntimeError: The process is a forked child, or the thread started before the attempt.
        """
        if _threads.fork_count != self._fork_count:
            raise RuntimeError(
                f"{function_name}() was called in process {os.getpid()}, a fork of process "
                f"{self._pid} (rank {self._rank}), but only process {self._pid} can report. "
                "Return the values from the DataLoader worker or child process, and call "
                f"{function_name}() in process {self._pid}."
            )
        # The common case and the cheapest check: every report() runs this.
        if threading.get_ident() == self._function_thread_id:
            return
        if (thread := threading.current_thread()) in self._foreign_threads:
            raise RuntimeError(
                f"{function_name}() was called in thread {thread.name!r}, which started before "
                f"this attempt of rank {self._rank}. Start the thread in the training function, "
                "and end it there."
            )

    def reset_reporting_thread(self) -> None:
        """Allow another thread to report, before and after the training function runs."""
        self._reporting_thread = None

    def check_reporting_thread(self, function_name: str) -> None:
        """Check that no other thread reports for this rank. Must not be called concurrently.

        Raises:
            RuntimeError: There are several ranks, and another living thread has reported.
        """
        if self._is_single_worker:
            return
        thread, reporting_thread = threading.current_thread(), self._reporting_thread
        if (
            reporting_thread is not thread
            and reporting_thread is not None
            and reporting_thread.is_alive()
        ):
            raise RuntimeError(
                f"Thread {thread.name!r} of rank {self._rank} called {function_name}, but thread "
                f"{reporting_thread.name!r} has already called report() or a collective. With "
                "several workers, make all these calls in one thread. Send values from other "
                "threads to this thread, for example through a queue.Queue."
            )
        self._reporting_thread = thread
