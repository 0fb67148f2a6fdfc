"""Interrupting user code that runs in a thread, from other threads."""

from __future__ import annotations

import ctypes
import threading


class AttemptInterrupted(BaseException):
    """Raised inside the training function when the controller ends the attempt.

    A `BaseException`, like `KeyboardInterrupt`, so that `except Exception` in user code lets it
    through.
    """


class Interruptible:
    """User code in a thread, which calls `begin` and `end` around it.

    An interruption that comes too late hits nothing: what the thread does afterwards, such as
    telling how the user code failed, is not disturbed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._is_wanted = False

    def begin(self) -> None:
        """Allow interruptions of this thread.

        Raises:
            AttemptInterrupted: There was one already.
        """
        with self._lock:
            self._thread = threading.get_ident()
            is_wanted = self._is_wanted
        if is_wanted:
            raise AttemptInterrupted

    def interrupt(self) -> None:
        """Raise `AttemptInterrupted` in the thread, at its next Python instruction."""
        with self._lock:
            self._is_wanted = True
            if self._thread is not None:
                _set_exception(self._thread, AttemptInterrupted)

    def end(self) -> None:
        """Allow no interruption any more; one that is on its way is taken back.

        Raises:
            AttemptInterrupted: It arrived in this very moment. No other one follows.
        """
        with self._lock:
            self._thread = None
            _set_exception(threading.get_ident(), None)


def _set_exception(thread: int, exception: type[BaseException] | None) -> None:
    given = None if exception is None else ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), given)
