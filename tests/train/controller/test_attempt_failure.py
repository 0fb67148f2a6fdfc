"""Root cause of a failed attempt, in any order of the messages."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from drawbar.train import (
    BackendConfig,
    RunConfig,
    WorkerGroupError,
    get_context,
)
from drawbar.train._controller.failures import AttemptFailure
from drawbar.train._protocol.messages import FilesPersisted, WorkerDied
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


@pytest.mark.parametrize("end", ["stored", "died", "hang"])
def test_failure_waits_for_files_until_rank_has_stored_them_or_died(end: str) -> None:
    async def wait() -> None:
        failure = AttemptFailure("hang" if end == "hang" else "worker")
        awaited = {0}

        def get_limit(ended: Collection[int]) -> float:
            return 600.0 if awaited and awaited.isdisjoint(ended) else 0.0

        waiting = asyncio.create_task(failure.wait_for_files(get_limit))
        await asyncio.sleep(0)
        assert waiting.done() == (end == "hang")  # the files may be the cause of a hang
        if end == "died":
            failure.on_message(0, WorkerDied(detail="", time=0.0))
        elif end == "stored":
            awaited.clear()
            failure.on_message(0, FilesPersisted(report_index=0, staging_directory=""))
        await waiting

    asyncio.run(wait())
