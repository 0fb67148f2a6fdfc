"""How much memory the processes below this one take at the most."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL = 0.02


@contextmanager
def peak_of_children() -> Iterator[list[float]]:
    """Watch the processes below this one; gives a list that holds the peak of the largest, in MB.

    Only what a process does not share counts: Ray's object store belongs to no worker.
    """
    import psutil

    peak = [0.0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(INTERVAL):
            for child in psutil.Process().children(recursive=True):
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
