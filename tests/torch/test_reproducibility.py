"""Tests of enable_reproducibility."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from drawbar.torch import TorchTrainer, enable_reproducibility, prepare_data_loader
from drawbar.train import Result, RunConfig, ScalingConfig


def draw(seed: int) -> list[Any]:
    enable_reproducibility(seed)
    numbers: Any = list(range(8))
    loader: Any = prepare_data_loader(DataLoader(numbers, shuffle=True))
    order = [int(x) for x in loader]
    return [random.random(), float(np.random.rand()), float(torch.rand(())), order]


def test_enable_reproducibility_with_same_seed_repeats_numbers(
    run_config: RunConfig, tmp_path: Any
) -> None:
    def numbers(seed: int, run: int) -> Any:
        return (
            TorchTrainer(
                lambda: draw(seed),
                scaling_config=ScalingConfig(num_workers=0),
                run_config=RunConfig(name=f"run{run}", storage_path=tmp_path),
            )
            .fit()
            .return_value
        )

    one, again, other = numbers(1, 0), numbers(1, 1), numbers(2, 2)
    assert one == again
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_enable_reproducibility_settings_end_with_attempt(fit: Callable[..., Result]) -> None:
    def function() -> list[Any]:
        enable_reproducibility()
        return state()

    def state() -> list[Any]:
        cudnn = torch.backends.cudnn
        flags = [torch.are_deterministic_algorithms_enabled(), cudnn.deterministic]
        return [*flags, cudnn.benchmark, os.environ.get("CUBLAS_WORKSPACE_CONFIG")]

    before = state()
    assert fit(function).return_value == [True, True, False, ":4096:8"]
    assert state() == before


def test_enable_reproducibility_with_seed_out_of_range_raises() -> None:
    with pytest.raises(ValueError, match=r"from 0 to 2\*\*32 - 1, found -1"):
        enable_reproducibility(-1)
