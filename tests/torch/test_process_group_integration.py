"""Tests of the process group of two workers on Ray: creation, and failure of one rank."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from drawbar.torch import TorchConfig, prepare_data_loader, prepare_model
from drawbar.train import (
    DivergenceError,
    FailureConfig,
    Result,
    RunConfig,
    WorkerGroupError,
    collective,
    get_context,
    report,
)
from drawbar.train.testing import BackendContract

pytestmark = pytest.mark.usefixtures("ray_cluster")


class TestTorchBackend(BackendContract):
    backend_config = TorchConfig()


def train_until(leave: Callable[[], None]) -> None:
    """Train in lockstep for ever; rank 1 leaves after a few steps."""
    model = prepare_model(torch.nn.Linear(1, 1))
    for step in range(1_000_000):
        if step == 3 and get_context().get_world_rank() == 1:
            leave()
            return
        model(torch.ones(1, 1)).sum().backward()


def boom() -> None:
    raise ValueError("boom")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_divergence_error_counts_the_users_collectives_and_names_the_remedy(
    fit: Callable[..., Result],
) -> None:
    def function() -> None:  # Drawbar itself has made collective calls before this line
        if get_context().get_world_rank() == 0:
            collective.barrier()

    with pytest.raises(DivergenceError) as raised:
        fit(function, num_workers=2)
    line = function.__code__.co_firstlineno + 2
    reason, remedy = str(raised.value).splitlines()[:2]
    assert "rank 1 finished after 0 reports and 0 collectives; " in reason
    assert f"rank 0 waits in collective #0 (barrier) at {__file__}:{line} in function" in reason
    assert "All ranks must call barrier() equally often. Move it out of branches" in remedy


def test_process_group_can_be_recreated_by_script(fit: Callable[..., Result]) -> None:
    def function() -> list[Any]:
        sizes = []
        for _ in range(2):
            dist.barrier()
            dist.destroy_process_group()
            collective.barrier()  # or rank 1 would find the store that rank 0 is about to leave
            dist.init_process_group("gloo")
            sizes.append(dist.get_world_size(dist.new_group([0, 1])))
        dist.barrier()  # the store is rank 0's: it must not leave while rank 1 still joins
        return sizes

    assert fit(function, num_workers=2).return_values == [[2, 2], [2, 2]]


@pytest.mark.usefixtures("patient_restarts")
@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        pytest.param(boom, "rank 1: ValueError: boom", marks=pytest.mark.nightly),
        (kill, "rank 1: worker process died"),
    ],
)
def test_surviving_worker_joins_new_process_group(
    fit: Callable[..., Result], run_config: RunConfig, leave: Callable[[], None], reason: str
) -> None:
    """Some modules of PyTorch use the group as a default argument if it exists at their import."""

    def function() -> tuple[bool, float]:
        context = get_context()
        if context.get_attempt() == 0:
            context.cache["kept"] = True
            importlib.import_module("torch.distributed.nn.functional")
            importlib.import_module("torch.distributed.fsdp.sharded_grad_scaler")
            train_until(leave)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return "kept" in context.cache, float(ones)

    config = RunConfig(
        name=run_config.name,
        storage_path=run_config.storage_path,
        failure_config=FailureConfig(max_failures=1),
    )
    result = fit(function, num_workers=2, run_config=config)
    (kept, total), (_, total_1) = result.return_values
    assert kept
    assert total == total_1 == 2.0
    assert reason in result.timeline.attempts[0].outcome


def test_collective_after_return_of_other_rank_raises(fit: Callable[..., Result]) -> None:
    with pytest.raises(WorkerGroupError) as raised:
        fit(lambda: train_until(lambda: report({"loss": 1.0})), num_workers=2)
    first, second = raised.value.failures
    assert (first.rank, second.rank) == (1, 0)
    message = str(raised.value)
    assert message.startswith("rank 1: left its training function: rank 1 returned while rank 0")
    assert f"({__file__}:" in message.splitlines()[0]  # the last report
    assert "after 1 report\n" in message
    assert "rank 0: RuntimeError" in message


def test_collective_of_slow_rank_times_out_without_blaming_other_rank(
    fit: Callable[..., Result], tmp_path: Path
) -> None:
    def function() -> None:
        timed_out = tmp_path / "timed-out"
        if get_context().get_world_rank() == 1:
            while not timed_out.exists():
                os.sched_yield()
            return
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            timed_out.touch()

    with pytest.raises(WorkerGroupError) as raised:
        fit(function, num_workers=2, torch_config=TorchConfig(timeout_s=5))
    assert "raise TorchConfig(timeout_s=...)" in str(raised.value)
    assert "another rank failed" not in str(raised.value)


def load_alone() -> None:
    for (batch,) in prepare_data_loader(DataLoader(TensorDataset(torch.ones(4, 1)), shuffle=True)):
        batch.sum()


def step_together() -> None:
    prepare_model(torch.nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()


@pytest.mark.parametrize(
    ("function", "num_warnings"),
    [
        (load_alone, 1),
        (step_together, 0),
        pytest.param(collective.barrier, 0, marks=pytest.mark.nightly),
    ],
)
def test_communication_check_without_collectives_warns_once(
    fit: Callable[..., Result], capfd: pytest.CaptureFixture[str], function: Any, num_warnings: int
) -> None:
    fit(lambda: function(), num_workers=2)
    assert capfd.readouterr().err.count("drawbar.torch.prepare_model(model)") == num_warnings


def test_communication_check_after_error_does_not_warn(
    fit: Callable[..., Result], capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> None:
        if get_context().get_world_rank() == 1:
            raise ValueError("an unrelated error")

    with pytest.raises(WorkerGroupError, match="an unrelated error"):
        fit(function, num_workers=2)
    assert "prepare_model" not in capfd.readouterr().err


def test_communication_check_with_one_worker_does_not_warn(
    fit: Callable[..., Result], capfd: pytest.CaptureFixture[str]
) -> None:
    fit(load_alone)
    assert "prepare_model" not in capfd.readouterr().err
