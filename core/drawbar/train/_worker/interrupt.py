"""Interrupting user code that runs in a thread, from other threads."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import NoReturn


class AttemptInterrupted(BaseException):
    """Raised inside the training function when the controller ends the attempt.

    A `BaseException`, like `KeyboardInterrupt`, so that `except Exception` in user code lets it
    through.
    """


class InterruptScope:
    """User code in a thread, which calls `begin` and `end` around it.

    An interruption that comes too late hits nothing: what the thread does afterwards, such as
    telling how the user code failed, is not disturbed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._is_requested = False
        self._is_sent = False
        self._has_raised = False

    def begin(self) -> None:
        """Allow interruptions of this thread.

        Raises:
            AttemptInterrupted: There was one already.
        """
        with self._lock:
            self._thread = threading.get_ident()
            # It may have come while this thread was being set up; nobody would send it again.
            is_wanted = self._is_requested
        if is_wanted:
            raise AttemptInterrupted

    def interrupt(self) -> None:
        """Raise `AttemptInterrupted` in the thread, at its next Python instruction."""
        with self._lock:
            self._is_requested = True
            if self._thread is not None and not self._has_raised:
                # Under the lock: else the thread could leave the user's code between the look and
                # the hit.
                self._is_sent = True
                _raise_in_thread(self._thread)

    def raise_interrupt(self, reason: str) -> NoReturn:
        """Raise `AttemptInterrupted` in the calling thread; if that is the user code's, once only.

        A second one would cut short what the user's code does because of the first, such as a
        `finally` that saves what there is.
        """
        with self._lock:
            is_here = self._thread == threading.get_ident()
            self._has_raised |= is_here
            is_sent = is_here and self._is_sent
        if is_sent:
            _discard_pending_exception()
        raise AttemptInterrupted(reason)

    def end(self) -> None:
        """Allow no interruption any more; one that is on its way is taken back.

        Raises:
            AttemptInterrupted: It arrived in this very moment. No other one follows.
        """
        with self._lock:
            self._thread = None
            is_sent = self._is_sent
        if is_sent:
            _discard_pending_exception()


THREAD_START_TIMEOUT_S = 1.0


def _raise_in_thread(thread: int) -> None:
    """Raise `AttemptInterrupted` in this very thread.

    Before Python 3.12 a thread that is being started has the id of the one that starts it, would
    get the exception in its place and die, and who starts it would wait for it for ever. So no
    thread is started in this moment. Only what `threading` starts can be seen: `_limbo` has it.
    """
    if sys.version_info >= (3, 12):
        _set_async_exception(thread, AttemptInterrupted)
        return
    lock, being_started = vars(threading)["_active_limbo_lock"], vars(threading)["_limbo"]
    deadline = time.monotonic() + THREAD_START_TIMEOUT_S  # one that never ended is left there
    while True:
        with lock:
            if not being_started or time.monotonic() > deadline:
                _set_async_exception(thread, AttemptInterrupted)
                return
        time.sleep(0)  # lets it be born


def _discard_pending_exception() -> None:
    """Let no exception be on its way to this thread: one of our own takes its place, and ends here.

    Setting none instead would leave Python 3.11 with a signal that nobody answers: every function
    of a thread that is traced (by a debugger, coverage, cProfile) would then never begin.
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
