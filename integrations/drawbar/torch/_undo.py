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

_changes: ExitStack | None = None


@contextmanager
def undone_at_end() -> Iterator[None]:
    """Put back, on the way out, everything that `at_end` was told inside; the last change first."""
    global _changes
    _put_back()  # an interrupt can have cut short what the attempt before had to put back
    _changes = ExitStack()
    try:
        yield
    finally:
        _put_back()


def at_end(undo: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call `undo(*args, **kwargs)` when the attempt ends, before its process group is let go.

    For what a library keeps in the process, such as groups made of the attempt's process group: the
    process may live on and run the next attempt. Several are called in reverse order. Outside an
    attempt nothing is put back.
    """
    if _changes is not None:
        _changes.callback(undo, *args, **kwargs)


def in_attempt() -> bool:
    """Whether this process is between the beginning and the end of an attempt."""
    return _changes is not None


def set_variable(name: str, value: str) -> None:
    """Set an environment variable until the attempt ends."""
    at_end(_restore_variable, name, os.environ.get(name))
    os.environ[name] = value


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _put_back() -> None:
    global _changes
    if _changes is not None:
        _changes.close()
        _changes = None
