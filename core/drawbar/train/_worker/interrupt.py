"""Interrupt user code in one thread from another thread."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import NoReturn


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
