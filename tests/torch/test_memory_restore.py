"""Tests of restarts that read a checkpoint of save_async from memory."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch

from drawbar import train
from drawbar.torch import load_state, save_async
from drawbar.train import FailureConfig, Result, RunConfig, WorkerGroupError, runs
from drawbar.train.testing import check_run

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

Fit = Callable[..., Result]


def with_restart(run_config: RunConfig, max_failures: int = 1) -> RunConfig:
    return replace(run_config, failure_config=FailureConfig(max_failures=max_failures))


def find_writers() -> list[psutil.Process]:
    """Return the writer processes of this user's tests on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if any(part.endswith("writer_process.py") for part in command):
            found.append(process)
    return found


def list_reads(result: Result) -> list[tuple[int, int, str, str]]:
    """Return attempt, rank, checkpoint, and source of each read."""
    events: list[dict[str, Any]] = runs.find_run(result.path).list_events()
    return [
        (event["attempt"], event["rank"], event["name"], event["source"])
        for event in events
        if event["event"] == "checkpoint_read"
    ]


def save(step: int) -> None:
    save_async({"step": step, "weights": torch.full((500_000,), float(step))}, {"step": step})
    train.get_all_reported_checkpoints()  # waits for the commit


def overwrite_stored_state() -> None:
    """Replace the content of the stored checkpoint, so that only memory has the state."""
    checkpoint = train.get_checkpoint()
    assert checkpoint is not None
    path = Path(checkpoint.path, "state.pt")
    path.write_bytes(bytes(path.stat().st_size))


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("killed_rank", [0, 1])
def test_restart_after_sigkill_reads_checkpoint_from_memory(
    ray_cluster: None, fit: Fit, run_config: RunConfig, killed_rank: int
) -> None:
    def function() -> tuple[int, bool]:
        rank = train.get_context().get_world_rank()
        state = load_state()
        if state is not None:
            is_equal = torch.equal(state["weights"], torch.full((500_000,), 1.0))
            save(state["step"] + 1)
            return state["step"], is_equal
        save(0)
        save(1)
        train.collective.barrier()
        if rank == 0:
            overwrite_stored_state()
        train.collective.barrier()
        if rank == killed_rank:
            kill_this_process()
        train.collective.barrier()
        return -1, False

    before = {process.pid for process in find_writers()}
    result = fit(function, 2, run_config=with_restart(run_config))
    assert result.return_value == (1, True)
    reads = sorted(list_reads(result))
    assert reads == [(1, rank, "checkpoint_000001", "memory") for rank in (0, 1)]
    assert {process.pid for process in find_writers()} <= before
