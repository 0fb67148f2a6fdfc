"""The error names what came first, however long the one to blame takes to tell."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from drawbar.train import BackendConfig, RunConfig, WorkerFailure, WorkerGroupError, get_context
from drawbar.train._controller.attempt_failure import AttemptFailure
from drawbar.train._messages import Gone
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


PATIENCE = 60.0


@pytest.mark.parametrize(
    "said",
    [
        "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41379",
        "Gloo all-reduce failed: Connection reset by peer",
        "NCCL error: remote process exited or there was a network error",
        "UNAVAILABLE: Collective ops is aborted by: Socket closed",
    ],
)
def test_a_death_that_a_peer_feels_before_ray_tells_is_waited_for(said: str) -> None:
    async def told_late() -> bool:
        failure = WorkerFailure(rank=0, kind="exception", type_name="RuntimeError", message=said)
        failed = AttemptFailure("worker", [failure])
        waiting = asyncio.create_task(failed.wait_for_root_cause(PATIENCE))
        waited = not (await asyncio.wait([waiting], timeout=0.1))[0]
        failed.on_message(1, Gone(detail="SIGKILL", time=0.0))
        await waiting
        return waited

    assert asyncio.run(told_late())


def test_nobody_is_waited_for_where_no_peer_is_missed() -> None:
    async def told() -> bool:
        failure = WorkerFailure(rank=0, kind="exception", type_name="ValueError", message="boom")
        waiting = asyncio.create_task(
            AttemptFailure("worker", [failure]).wait_for_root_cause(PATIENCE)
        )
        return bool((await asyncio.wait([waiting], timeout=PATIENCE))[0])

    assert asyncio.run(told())
