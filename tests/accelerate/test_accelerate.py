"""Tests of drawbar.accelerate without workers: Accelerate's state, and errors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin

from drawbar.accelerate import check_accelerator, launch, load_state
from drawbar.torch._accelerate_state import reset_accelerate_state
from drawbar.torch._attempt_cleanup import attempt_cleanup
from drawbar.torch._compat import get_accelerate_states
from drawbar.train import RunConfig, ScalingConfig, WorkerGroupError


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    for state in get_accelerate_states():
        state.clear()


def attempt(environment: dict[str, str]) -> int:
    """Make an `Accelerator` as in an attempt; gives its number of processes."""
    with attempt_cleanup():
        reset_accelerate_state()
        os.environ.update(environment)
        return int(Accelerator(cpu=True).num_processes)


def test_accelerate_state_after_attempt_is_reset() -> None:
    with attempt_cleanup():
        reset_accelerate_state()
        Accelerator(cpu=True, gradient_accumulation_steps=4, mixed_precision="bf16")
        os.environ["ACCELERATE_USE_FSDP"] = "true"
    assert "ACCELERATE_USE_FSDP" not in os.environ
    assert get_accelerate_states() == [{}, {}, {}]
    with attempt_cleanup():
        reset_accelerate_state()
        assert Accelerator(cpu=True).mixed_precision == "no"


def test_accelerate_state_of_user_process_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    own = Accelerator(cpu=True)
    with attempt_cleanup():
        reset_accelerate_state()
        del os.environ["ACCELERATE_MIXED_PRECISION"]
        assert Accelerator(cpu=True).mixed_precision == "no"
    assert own.state.mixed_precision == AcceleratorState().mixed_precision == "bf16"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


def fit(function: Any, run_config: RunConfig) -> Any:
    workers = ScalingConfig(num_workers=0)
    return launch(function, (), workers, run_config=run_config).return_value


def test_accelerator_in_local_mode_has_one_process(run_config: RunConfig) -> None:
    def function() -> tuple[int, str]:
        accelerator = check_accelerator(Accelerator())
        return accelerator.num_processes, accelerator.device.type

    expected = "cpu" if not torch.cuda.is_available() else "cuda"
    assert fit(function, run_config) == (1, expected)


def test_check_accelerator_with_ignored_plugin_raises(run_config: RunConfig) -> None:
    def function() -> None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        check_accelerator(Accelerator(cpu=True, fsdp_plugin=plugin))

    with pytest.raises(WorkerGroupError, match=r"ignored the FSDP plugin.*use_gpu=True"):
        fit(function, run_config)


def test_check_accelerator_outside_training_function_raises() -> None:
    with pytest.raises(RuntimeError, match="inside a training function"):
        load_state(Accelerator(cpu=True))


@pytest.mark.usefixtures("ray_cluster")
def test_launch_with_shared_gpu_raises(run_config: RunConfig) -> None:
    half = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.5})
    with pytest.raises(ValueError, match=r"workers that share a GPU.*\['GPU'\]=0.5"):
        launch(print, (), half, run_config=run_config)


def test_launch_with_args_of_other_type_raises() -> None:
    with pytest.raises(TypeError, match=re.escape("args must be a tuple or list")):
        launch(print, "digits")
