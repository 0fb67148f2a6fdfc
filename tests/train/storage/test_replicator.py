"""Tests of the thread that copies checkpoints to a memory store, without a run."""

from __future__ import annotations

import fcntl
import os
import queue
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from drawbar._async_save.memory_files import MemoryFiles
from drawbar._async_save.memory_replication import NodeStores
from drawbar._async_save.memory_store import MemoryStore
from drawbar._async_save.replicator import Replicator
from drawbar._storage.contents import FileEntry

CONTENT = b"content"
FILE = FileEntry("state.pt", len(CONTENT))
PATIENCE_S = 300


@pytest.fixture
def files() -> Iterator[MemoryFiles]:
    """Return files that the writer process has written."""
    files = MemoryFiles()
    with files.open(FILE.path) as file:
        file.write(CONTENT)
    files.truncate()
    fcntl.flock(files.get_descriptors()[FILE.path], fcntl.LOCK_UN)
    yield files
    files.release()


@pytest.fixture
def store(ray_cluster: None) -> Iterator[Any]:
    actor: Any = ray.remote(num_cpus=0)(MemoryStore).remote()
    yield actor
    ray.kill(actor)


class Sender:
    """Rank with a `Replicator` whose node and peer have the same store."""

    def __init__(self, store: Any, files: MemoryFiles) -> None:
        self._store = store
        self._stores = ray.put(NodeStores(store, store, []))
        self._files = files
        self._replicator = Replicator()
        self.reasons = queue.SimpleQueue[str]()

    def submit(self, name: str) -> None:
        descriptors = self._files.get_descriptors()
        self._replicator.submit(self._stores, self.reasons.put, name, descriptors)

    def wait_for_copy(self, name: str) -> None:
        while FILE.path not in ray.get(self._store.list_files.remote(name)):
            pass


def test_replicator_of_dead_store_reports_the_reason(store: Any, files: MemoryFiles) -> None:
    sender = Sender(store, files)
    ray.kill(store)
    sender.submit("0/0")
    assert "process that keeps the copies" in sender.reasons.get(timeout=PATIENCE_S)


def test_replicator_of_slow_store_does_not_wait_and_sends_the_newest_checkpoint(
    store: Any, files: MemoryFiles
) -> None:
    sender = Sender(store, files)
    sender.submit("0/0")
    sender.wait_for_copy("0/0")
    pid = ray.get(store.open_files.remote("0/0", [FILE]))[FILE.path].pid
    os.kill(pid, signal.SIGSTOP)
    for number in range(1, 4):
        sender.submit(f"0/{number}")
    assert "takes longer" in sender.reasons.get(timeout=PATIENCE_S)
    os.kill(pid, signal.SIGCONT)
    sender.wait_for_copy("0/3")
