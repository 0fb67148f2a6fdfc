"""Wait until a condition becomes true."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_SECONDS = 0.02


def becomes_true(condition: Callable[[], bool], *, within: float) -> bool:
    """Poll a condition for a number of seconds; return whether it became true."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True
