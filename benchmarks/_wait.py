"""Waiting for what no event tells of: files of other processes, and Ray's account of them."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_SECONDS = 0.02


def becomes_true(condition: Callable[[], bool], *, within: float) -> bool:
    """Look again and again, for so many seconds at most; tells whether the condition was met."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True
