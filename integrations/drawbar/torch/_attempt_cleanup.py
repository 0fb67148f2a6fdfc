"""Undo process-wide changes when an attempt ends.

A worker process may run several attempts, with different ranks and world sizes. With
`num_workers=0` it is the user's process. So this package makes all process-wide changes
(environment variables, thread counts, random generators, the process group) through this module.
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
    """Call the callbacks of `on_attempt_end` on exit, in reverse order."""
    global _cleanup_stack
    _run_cleanup()  # an interrupt may have stopped the cleanup of the previous attempt
    _cleanup_stack = ExitStack()
    try:
        yield
    finally:
        _run_cleanup()


def on_attempt_end(callback: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a function when the attempt ends, before its process group is destroyed.

    Use it to release state that a library keeps in the process, for example process groups. The
    next attempt may run in the same process and would find this state. Callbacks are called in
    reverse order. Outside an attempt, the callback is never called.

    Args:
        callback: Function to call.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.

    Example:
        ```python
        group = torch.distributed.new_group([0, 1])
        drawbar.torch.on_attempt_end(torch.distributed.destroy_process_group, group)
        ```
    """
    if _cleanup_stack is not None:
        _cleanup_stack.callback(callback, *args, **kwargs)


def is_in_attempt() -> bool:
    """Return whether this process is currently running an attempt."""
    return _cleanup_stack is not None


def set_env(name: str, value: str) -> None:
    """Set an environment variable until the attempt ends."""
    on_attempt_end(restore_env, name, os.environ.get(name))
    os.environ[name] = value


def restore_env(name: str, value: str | None) -> None:
    """Set an environment variable, or remove it if the value is None."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _run_cleanup() -> None:
    global _cleanup_stack
    if _cleanup_stack is not None:
        _cleanup_stack.close()
        _cleanup_stack = None
