"""Find the session of the calling thread or process.

A worker process has one session for all its threads; in `drawbar.train.testing`, each rank is a
thread with its own session.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from drawbar._base.frames import is_drawbar_frame
from drawbar.train._worker.session import Session


class _ThreadLocalSession(threading.local):
    session: Session | None = None


_process_sessions: list[Session] = []
_thread_local = _ThreadLocalSession()


def _find_program_session() -> Session | None:
    """Return None until `set_program_session_finder` replaces this function."""
    return None


def set_program_session_finder(find: Callable[[], Session | None]) -> None:
    """Set how a process finds its session if it is a program that runs in place of a worker.

    Args:
        find: Returns the session; None if this process is no program.
    """
    global _find_program_session
    _find_program_session = find


@contextmanager
def use_session(session: Session, *, is_process_wide: bool) -> Iterator[None]:
    """Use a session in the calling thread.

    Sessions of concurrent `num_workers=0` runs may start and end in any order.

    Args:
        session: Session to use.
        is_process_wide: Whether threads without a session use it too.
    """
    session.thread_guard.start()
    # Restored at the end: with `num_workers=0`, a training function may call `fit()` itself.
    previous, _thread_local.session = _thread_local.session, session
    if is_process_wide:
        _process_sessions.append(session)
    try:
        yield
    finally:
        _thread_local.session = previous
        if is_process_wide:
            _process_sessions.remove(session)


def can_save_on_request() -> bool:
    """Return whether a function of this process has called `should_checkpoint()`."""
    return any(session.requests.call_count for session in _process_sessions)


def current_session(function_name: str) -> Session:
    """Return the session of this thread or process, for a call that may send messages.

    Args:
        function_name: Public function that the user called, for error messages.

    Raises:
        RuntimeError: Called outside a training function, in a forked child, or in a thread of an
            earlier attempt.
    """
    session = find_session(function_name)
    session.thread_guard.check_caller(function_name)
    return session


def find_session(function_name: str | None = None) -> Session:
    """Return the session of this thread or process, also in a forked child.

    Args:
        function_name: Public function that the user called, for error messages. Default: found
            on the stack.

    Raises:
        RuntimeError: Called outside a training function.
    """
    # The thread's session first: with `drawbar.train.testing`, several ranks share this process.
    session = (
        _thread_local.session or next(reversed(_process_sessions), None) or _find_program_session()
    )
    if session is None:
        raise RuntimeError(
            f"{function_name or _find_public_caller()}() works inside a training function only, "
            "while a Drawbar trainer runs it. Call it in train_loop_per_worker, not in the driver, "
            "in another process, or in a thread that outlives the function. With "
            "drawbar.train.testing, call it in the thread of the function."
        )
    return session


def _find_public_caller() -> str:
    """Return the name of the Drawbar or integration function that the user called."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_drawbar_frame(frame.f_back):
        frame = frame.f_back
    return frame.f_code.co_qualname.removesuffix(".__init__")
