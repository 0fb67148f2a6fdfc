"""What an attempt changes in its process is put back when the attempt ends.

A worker's process may outlive an attempt and run the next one, with other ranks and another world
size; with `num_workers=0` it is the user's own. So whatever in this package touches the process
(environment variables, thread counts, random generators, the process group) does it through here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec

P = ParamSpec("P")

_cleanup_stack: ExitStack | None = None


@contextmanager
def attempt_cleanup() -> Iterator[None]:
    """Put back, on the way out, everything that `at_end` was told inside; the last change first."""
    global _cleanup_stack
    _run_cleanup()  # an interrupt can have cut short what the attempt before had to put back
    _cleanup_stack = ExitStack()
    try:
        yield
    finally:
        _run_cleanup()


def on_attempt_end(undo: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call `undo(*args, **kwargs)` when the attempt ends, before its process group is let go.

    For what a library keeps in the process, such as groups made of the attempt's process group: the
    process may live on and run the next attempt. Several are called in reverse order. Outside an
    attempt nothing is put back.
    """
    if _cleanup_stack is not None:
        _cleanup_stack.callback(undo, *args, **kwargs)


def is_in_attempt() -> bool:
    """Whether this process is between the beginning and the end of an attempt."""
    return _cleanup_stack is not None


def set_env(name: str, value: str) -> None:
    """Set an environment variable until the attempt ends."""
    on_attempt_end(_restore_env, name, os.environ.get(name))
    os.environ[name] = value


def _restore_env(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _run_cleanup() -> None:
    global _cleanup_stack
    if _cleanup_stack is not None:
        _cleanup_stack.close()
        _cleanup_stack = None
