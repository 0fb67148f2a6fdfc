"""Show phases of a start only if they are slow, so that quick runs print few lines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLOW_AFTER_S = 2.0

START_PHASES = ("importing", "joining the process group")
"""Phases of an attempt from the start of its processes to the first line of the function."""


def run_if_slow(action: Callable[[], object]) -> threading.Timer:
    """Call a function after `SLOW_AFTER_S` seconds, unless the returned timer is cancelled."""
    timer = threading.Timer(SLOW_AFTER_S, action)
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def print_if_slow(text: str) -> Iterator[None]:
    """Print a line to stderr if the body takes longer than `SLOW_AFTER_S` seconds."""
    line = f"[drawbar] {text} (more than {SLOW_AFTER_S:g} s so far)"
    timer = run_if_slow(lambda: print(line, file=sys.stderr, flush=True))
    try:
        yield
    finally:
        timer.cancel()
