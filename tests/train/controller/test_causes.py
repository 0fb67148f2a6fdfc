"""The error names what came first, however long the one to blame takes to tell."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from drawbar.train import BackendConfig, RunConfig, WorkerGroupError, get_context
from drawbar.train.testing import run_in_threads


@dataclass
class LetsGoSlowly(BackendConfig):
    """Rank 0 fails as soon as rank 1 lets go of it, and has told before rank 1 can."""

    released = threading.Event()

    @contextlib.contextmanager
    def train_func_context(self) -> Iterator[None]:
        try:
            yield
        finally:
            if get_context().get_world_rank() == 1:
                self.released.set()
                (peer,) = (each for each in threading.enumerate() if each.name == "rank-0")
                peer.join()
                threading.Event().wait(0.3)  # the peer's error is being dealt with


def test_a_peers_failure_is_not_the_cause_if_it_is_told_first(tmp_path: Path) -> None:
    backend = LetsGoSlowly()

    def function() -> None:
        if get_context().get_world_rank() == 1:
            raise ValueError("what went wrong")
        backend.released.wait()
        raise ConnectionError("a peer is gone")

    with pytest.raises(WorkerGroupError, match=r"^rank 1: ValueError: what went wrong") as caught:
        run_in_threads(
            function, backend_config=backend, run_config=RunConfig(storage_path=tmp_path)
        )
    assert [failure.rank for failure in caught.value.failures] == [1, 0]
