"""The exception of Ctrl-C, and the exit code of a program that it ends."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType

from drawbar._process.errors import UserAbort

_EXIT_CODE = 130  # 128 + SIGINT, as in a shell

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def make_user_abort(message: str) -> UserAbort:
    """Return the exception, and make Python exit with code 130 if no code of the user catches it.

    Python itself does so only for `KeyboardInterrupt`, and exits with 1 for its subclasses.
    """
    is_installed = getattr(sys.excepthook, "func", None) is _exit_after_abort
    if not is_installed and not _is_interactive():
        sys.excepthook = functools.partial(_exit_after_abort, sys.excepthook)
    return UserAbort(message)


def _exit_after_abort(
    show: _ExceptHook,
    error_type: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    show(error_type, error, traceback)
    if isinstance(error, UserAbort):
        raise SystemExit(_EXIT_CODE)


def _is_interactive() -> bool:
    """Return whether Python waits for input after an exception, which must not end it."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect)
