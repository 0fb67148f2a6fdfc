"""Root cause of a failed attempt, in any order of the messages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from drawbar.train import (
    BackendConfig,
    RunConfig,
    WorkerGroupError,
    get_context,
)
from drawbar.train.testing import run_in_threads


@dataclass
class SlowCleanup(BackendConfig):
    """Delay the failure of rank 1 until rank 0, which fails as a consequence, has sent its own."""

    released = threading.Event()

    @contextlib.contextmanager
    def train_func_context(self) -> Iterator[None]:
        try:
            yield
        finally:
            if get_context().get_world_rank() == 1:
                self.released.set()
                (peer,) = (thread for thread in threading.enumerate() if thread.name == "rank-0")
                peer.join()
                threading.Event().wait(0.3)  # the controller handles the peer's error


def test_root_cause_is_earliest_exception_even_if_it_arrives_late(tmp_path: Path) -> None:
    backend = SlowCleanup()

    def function() -> None:
        if get_context().get_world_rank() == 1:
            raise ValueError("root cause")
        backend.released.wait()
        raise ConnectionError("lost a peer")

    with pytest.raises(WorkerGroupError, match=r"^rank 1: ValueError: root cause") as caught:
        run_in_threads(
            function, backend_config=backend, run_config=RunConfig(storage_path=tmp_path)
        )
    assert [failure.rank for failure in caught.value.failures] == [1, 0]
