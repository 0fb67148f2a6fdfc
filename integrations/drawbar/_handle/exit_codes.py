"""Exit code of a script that does not handle the error of a run."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TypeVar

from drawbar._process.errors import TrainingFailedError

EXIT_DO_NOT_RETRY = 70
"""Exit code if another start of the run would fail again (EX_SOFTWARE in sysexits.h)."""

ErrorT = TypeVar("ErrorT", bound=BaseException)


def use_exit_code(error: ErrorT) -> ErrorT:
    """Let the script exit with `EXIT_DO_NOT_RETRY` if it does not handle an error like this.

    Python exits with code 1 after each exception. Only an exception hook can change the code: it
    raises SystemExit after the traceback is printed.

    Args:
        error: Error that is about to be raised.

    Returns:
        The same error.
    """
    if _is_final(error) and not isinstance(sys.excepthook, _ExitHook):
        sys.excepthook = _ExitHook()
    return error


class _ExitHook:
    """Exception hook that calls the previous one, and then sets the exit code."""

    def __init__(self) -> None:
        self._previous = sys.excepthook

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._previous(kind, error, traceback)
        if _is_final(error) or _is_final(error.__cause__):
            raise SystemExit(EXIT_DO_NOT_RETRY)


def _is_final(error: BaseException | None) -> bool:
    return isinstance(error, TrainingFailedError) and not error.should_retry
