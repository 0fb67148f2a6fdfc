"""Tests of drawbar.accelerate without workers: Accelerate's state, and errors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import is_initialized
from accelerate.utils import FullyShardedDataParallelPlugin

from drawbar import train
from drawbar.accelerate import check_accelerator, launch, load_state, report_state
from drawbar.torch import prepare_data_loader
from drawbar.train import RunConfig, ScalingConfig, WorkerGroupError
from tests.stops import stop_run


def fit(function: Any, run_config: RunConfig) -> Any:
    workers = ScalingConfig(num_workers=0)
    return launch(function, (), workers, run_config=run_config).return_value


def test_accelerate_state_after_attempt_is_reset(tmp_path: Path) -> None:
    def first() -> None:
        Accelerator(cpu=True, gradient_accumulation_steps=4, mixed_precision="bf16")
        os.environ["ACCELERATE_USE_FSDP"] = "true"

    def second() -> tuple[str, int]:
        accelerator = Accelerator(cpu=True)
        return accelerator.mixed_precision, accelerator.gradient_accumulation_steps

    fit(first, RunConfig(storage_path=tmp_path))
    assert "ACCELERATE_USE_FSDP" not in os.environ
    assert not is_initialized()
    assert fit(second, RunConfig(storage_path=tmp_path)) == ("no", 1)


def test_accelerator_in_local_mode_has_one_process(run_config: RunConfig) -> None:
    def function() -> tuple[int, str]:
        accelerator = check_accelerator(Accelerator())
        return accelerator.num_processes, accelerator.device.type

    expected = "cpu" if not torch.cuda.is_available() else "cuda"
    assert fit(function, run_config) == (1, expected)


def test_check_accelerator_with_ignored_plugin_raises(run_config: RunConfig) -> None:
    def function() -> None:
        plugin = FullyShardedDataParallelPlugin()
        check_accelerator(Accelerator(cpu=True, fsdp_plugin=plugin))

    with pytest.raises(WorkerGroupError, match=r"ignored the FSDP plugin.*use_gpu=True"):
        fit(function, run_config)


@pytest.mark.usefixtures("ray_cluster")
def test_launch_with_shared_gpu_raises(run_config: RunConfig) -> None:
    half = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.5})
    with pytest.raises(ValueError, match=r"workers that share a GPU.*\['GPU'\]=0.5"):
        launch(print, (), half, run_config=run_config)


def test_launch_with_args_of_other_type_raises() -> None:
    with pytest.raises(TypeError, match=re.escape("args must be a tuple or list")):
        launch(print, "digits")


def test_stop_saves_state_of_this_step_and_resumes_there(tmp_path: Path) -> None:
    def function() -> list[float]:
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.nn.init.ones_(model.weight)
        numbers: Any = [torch.tensor([float(i)]) for i in range(6)]
        data = prepare_data_loader(torch.utils.data.DataLoader(numbers))
        model, optimizer = accelerator.prepare(model, optimizer)
        load_state(accelerator)
        seen = []
        for batch in data:
            seen.append(batch.item())
            model(batch).sum().backward()
            optimizer.step()
            if batch.item() == 2:
                stop_run()
            if train.should_checkpoint():
                report_state(accelerator, {"seen": len(seen)})
        return seen

    config = RunConfig(name="run", storage_path=tmp_path)
    fit(function, config)
    assert fit(function, config) == [3.0, 4.0, 5.0]
