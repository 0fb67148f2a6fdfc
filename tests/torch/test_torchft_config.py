"""Tests of `TorchftConfig`, Ray Train's name for in-place recovery."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from drawbar import train
from drawbar.torch import (
    TorchftConfig,
    TorchTrainer,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)
from drawbar.train import (
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    runs,
)

NUM_STEPS = 20


class LinearDataset(Dataset[Any]):
    """y = a * x + b, as in Ray Train's example of torchft."""

    def __init__(self, a: float, b: float, size: int = 1000) -> None:
        x = np.arange(0, 10, 10 / size, dtype=np.float32)
        self.x = torch.from_numpy(x)
        self.y = torch.from_numpy(a * x + b)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index, None], self.y[index, None]

    def __len__(self) -> int:
        return len(self.x)


def train_linear_model(config: dict[str, Any]) -> int:
    """Ray Train's example of torchft, with Drawbar's functions instead of torchft's classes.

    Returns:
        Number of steps of this process.
    """
    context = train.get_context()
    model: Any = prepare_model(torch.nn.Linear(1, 1))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    loss_fn = torch.nn.MSELoss()
    dataset = LinearDataset(2, 5, size=NUM_STEPS * 4 * context.get_world_size())
    loader = prepare_data_loader(DataLoader(dataset, batch_size=4))
    marker, num_steps = Path(config["directory"]) / "error_marker", 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        if context.get_world_rank() == 1 and num_steps == NUM_STEPS // 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        num_steps += 1
    with train.checkpoint_dir() as path:
        train.report({"loss": loss.item(), "steps": num_steps}, checkpoint=path)
    return num_steps


@pytest.mark.usefixtures("ray_cluster")
def test_torchft_config_replaces_dead_rank_in_place(
    fit: Callable[..., Result], run_config: RunConfig, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="lighthouse_kwargs=.* has no effect") as warned:
        torch_config = TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo")
    assert [warning.filename for warning in warned] == [__file__]
    result = fit(
        train_linear_model,
        train_loop_config={"directory": str(tmp_path)},
        torch_config=torch_config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=replace(run_config, failure_config=FailureConfig(max_failures=3)),
    )
    assert result.return_values == [NUM_STEPS, NUM_STEPS // 2]
    kinds = [event["event"] for event in runs.find_run(result.path).list_events()]
    assert (kinds.count("attempt_started"), kinds.count("recovered_in_place")) == (1, 1)


@pytest.mark.usefixtures("ray_cluster")
def test_torchft_config_without_restarts_warns_and_ends_run_with_first_failure(
    fit: Callable[..., Result], tmp_path: Path
) -> None:
    with (
        pytest.warns(UserWarning, match=r"TorchftConfig has no effect.*max_failures=0"),
        pytest.raises(TrainingFailedError, match="SIGKILL"),
    ):
        fit(
            train_linear_model,
            num_workers=2,
            train_loop_config={"directory": str(tmp_path)},
            torch_config=TorchftConfig(lighthouse_kwargs={}),
        )


@pytest.mark.parametrize(
    ("torch_options", "failure_options", "scaling_config", "message"),
    [
        ({}, {}, ScalingConfig(num_workers=1), "TorchftConfig needs a rank that survives"),
        ({}, {}, ScalingConfig(num_workers=(2, 3)), "TorchftConfig needs a fixed number"),
        ({}, {}, ScalingConfig(num_workers=0), "TorchftConfig needs workers that are Ray actors"),
        ({}, {}, ScalingConfig(num_workers=2, use_gpu=True), "TorchftConfig needs CPU workers"),
        ({"backend": "mpi"}, {}, ScalingConfig(num_workers=2), "TorchftConfig needs CPU workers"),
        ({}, {"stall_warning_after": None}, ScalingConfig(num_workers=2), "TorchftConfig requests"),
    ],
    ids=["one_worker", "elastic", "local", "gpu", "backend", "no_stall_warning"],
)
@pytest.mark.usefixtures("ray_cluster")
def test_torchft_config_with_impossible_settings_raises_before_start(
    run_config: RunConfig,
    torch_options: dict[str, Any],
    failure_options: dict[str, Any],
    scaling_config: ScalingConfig,
    message: str,
) -> None:
    failures = FailureConfig(max_failures=1, **failure_options)
    trainer = TorchTrainer(
        print,
        torch_config=TorchftConfig(lighthouse_kwargs={}, **torch_options),
        scaling_config=scaling_config,
        run_config=replace(run_config, failure_config=failures),
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit()


def test_torchft_config_has_import_path_of_ray_train() -> None:
    module = importlib.import_module("drawbar.train.v2.torch.torchft_config")
    assert module.TorchftConfig is TorchftConfig
