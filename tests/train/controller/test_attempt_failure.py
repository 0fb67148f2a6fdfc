"""Root cause of a failed attempt, in any order of the messages."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from drawbar.train import (
    BackendConfig,
    PreemptionError,
    RunConfig,
    WorkerFailure,
    WorkerGroupError,
    get_context,
)
from drawbar.train._controller.failures import AttemptFailure, make_training_failed_error
from drawbar.train._protocol.messages import WorkerDied
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


TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    "message",
    [
        "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41379",
        "Gloo all-reduce failed: Connection reset by peer",
        "NCCL error: remote process exited or there was a network error",
        "UNAVAILABLE: Collective ops is aborted by: Socket closed",
    ],
)
def test_root_cause_of_lost_connection_waits_for_peer_death(message: str) -> None:
    async def has_waited() -> bool:
        failure = WorkerFailure(rank=0, kind="exception", type_name="RuntimeError", message=message)
        attempt_failure = AttemptFailure("worker", [failure])
        task = asyncio.create_task(attempt_failure.wait_for_root_cause(TIMEOUT_S))
        is_waiting = not (await asyncio.wait([task], timeout=0.1))[0]
        attempt_failure.on_message(1, WorkerDied(detail="SIGKILL", time=0.0))
        await task
        return is_waiting

    assert asyncio.run(has_waited())


def test_root_cause_of_plain_exception_does_not_wait() -> None:
    async def is_done() -> bool:
        failure = WorkerFailure(rank=0, kind="exception", type_name="ValueError", message="boom")
        task = asyncio.create_task(
            AttemptFailure("worker", [failure]).wait_for_root_cause(TIMEOUT_S)
        )
        return bool((await asyncio.wait([task], timeout=TIMEOUT_S))[0])

    assert asyncio.run(is_done())


def test_preemption_after_a_checkpoint_without_budget_raises_preemption_error() -> None:
    error = make_training_failed_error(
        "preemption", [], None, reason="no budget", path="/runs/a", recoverable="Resume it."
    )
    assert isinstance(error, PreemptionError)
    assert str(error) == (
        "a node of the workers was lost or is being removed\n\n"
        "The run ends: no budget.\nRun directory: /runs/a\nResume it."
    )
