"""Measure the peak memory of child processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL = 0.1
LOOKS_PER_LIST = 10
"""To list all processes costs more than to look at the known ones, and time is measured meanwhile:
so the watch takes 0.5% of a core."""


@contextmanager
def peak_of_children() -> Iterator[list[float]]:
    """Watch the processes below this one; gives a list that holds the peak of the largest, in MB.

    Only what a process does not share counts: Ray's object store belongs to no worker.
    """
    import psutil

    peak = [0.0]
    over = threading.Event()

    def watch() -> None:
        children: list[psutil.Process] = []
        looks = 0
        while not over.wait(INTERVAL):
            if looks % LOOKS_PER_LIST == 0:
                children = psutil.Process().children(recursive=True)
            looks += 1
            for child in children:
                try:
                    memory = child.memory_info()
                except psutil.NoSuchProcess:
                    continue
                peak[0] = max(peak[0], (memory.rss - memory.shared) / 2**20)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()
