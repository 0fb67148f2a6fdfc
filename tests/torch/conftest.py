"""Run a function as a training function: in this process by default, on Ray with `num_workers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from drawbar.torch import TorchTrainer
from drawbar.train import Result, RunConfig, ScalingConfig


@pytest.fixture
def fit(run_config: RunConfig) -> Callable[..., Result]:
    """`fit(function, num_workers=0, **options)`; `options` are TorchTrainer's."""

    def fit(function: Any, num_workers: int = 0, **options: Any) -> Result:
        defaults = {
            "scaling_config": ScalingConfig(num_workers=num_workers),
            "run_config": run_config,
        }
        return TorchTrainer(function, **{**defaults, **options}).fit()

    return fit


@pytest.fixture(scope="module", autouse=True)
def _fork_workers(preload_torch: None) -> None:
    """Use the fork server in all modules."""
