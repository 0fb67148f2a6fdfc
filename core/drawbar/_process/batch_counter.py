"""Count the batches that a rank has received since its last report, and describe the last one.

The controller compares the counts of two failures to find out whether they happened at the same
data. A worker process keeps its counter in shared memory, from which the sentinel reads it after
the process has died.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable

from drawbar._base.wording import format_count

NBYTES = 8
"""Size of a counter: one native 64-bit integer."""

_shared: mmap.mmap | None = None


class _Current(threading.local):
    """Counter and description of the training function that runs in this thread."""

    counter: memoryview | None = None
    describe: Callable[[], str] | None = None


_current = _Current()


def share_counter() -> int:
    """Move the counter of this process to memory that the sentinel can read.

    Returns:
        Descriptor of the memory; -1 if the system does not support it.
    """
    global _shared
    try:
        descriptor = os.memfd_create("drawbar-batches")
        os.truncate(descriptor, NBYTES)
        _shared = mmap.mmap(descriptor, NBYTES)
    except (AttributeError, OSError):  # not Linux, or a sandbox without memfd
        return -1
    return descriptor


def start_counter() -> memoryview:
    """Start a counter for the training function in this thread.

    Returns:
        A sequence of one number, which the caller increases and resets.
    """
    counter = memoryview(bytearray(NBYTES) if _shared is None else _shared).cast("q")
    counter[0] = 0
    _current.counter, _current.describe = counter, None
    return counter


def format_place(num_batches: int, report_index: int) -> str:
    """Return the place of a rank in its data, such as "batch 3 after 7 reports"."""
    if not num_batches and not report_index:
        return "at the start"
    reports = f"after {format_count(report_index, 'report')}"
    return f"batch {num_batches} {reports}" if num_batches else reports


def get_num_batches() -> int | None:
    """Return the count of the training function in this thread; None if there is none."""
    return None if _current.counter is None else int(_current.counter[0])


def register_batch_description(describe: Callable[[], str]) -> None:
    """Register a function that describes the batch which the training function processes.

    If the training function fails, the error message contains the description. Call this in the
    thread of the training function. A second call replaces the first.

    Args:
        describe: Returns a short text such as "epoch 2, rows 96 to 127", or "" without a batch.

    Example:
        >>> register_batch_description(lambda: f"epoch {loader.epoch}, file {loader.file}")
    """
    _current.describe = describe


def describe_batch() -> str:
    """Return the description of the current batch of this thread; "" if there is none."""
    # It follows a failure of the function, which must not be hidden by another one.
    with contextlib.suppress(Exception):
        return "" if _current.describe is None else _current.describe()
    return ""
