"""Run LightGBM functions on Ray, with small data of which the right answers are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightgbm
import numpy as np
import pytest

from drawbar.lightgbm import LightGBMTrainer
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig


@pytest.fixture
def fit(run_config: RunConfig, ray_cluster: None) -> Callable[..., Result]:
    """`fit(function, num_workers=2, max_failures=0, **options)`; `options` are the trainer's."""

    def fit(function: Any, num_workers: int = 2, max_failures: int = 0, **options: Any) -> Result:
        failures = FailureConfig(max_failures=max_failures)
        config = RunConfig(
            name=run_config.name, storage_path=run_config.storage_path, failure_config=failures
        )
        defaults = {
            "scaling_config": ScalingConfig(num_workers=num_workers),
            "run_config": config,
        }
        return LightGBMTrainer(function, **{**defaults, **options}).fit()

    return fit


@pytest.fixture(scope="session")
def binary() -> tuple[Any, Any]:
    """Give 2000 rows of 6 features with 21 values each, and noisy labels."""
    random = np.random.default_rng(0)
    x = random.integers(0, 21, (2000, 6)).astype(np.float32)
    y = (x[:, 0] + 2 * x[:, 1] + random.normal(0, 6, 2000) > 30).astype(np.float32)
    return x, y


@pytest.fixture(scope="session")
def ndcg_at_3() -> Callable[..., float]:
    """LightGBM's own value of given scores, for one process: of a round that changes no score."""

    def nothing(predicted: Any, data: Any) -> tuple[Any, Any]:
        return np.zeros_like(predicted), np.ones_like(predicted)

    def ndcg(scores: Any, x: Any, y: Any, sizes: Any) -> float:
        params = {"objective": nothing, "metric": "ndcg", "ndcg_eval_at": [3], "verbosity": -1}
        data = lightgbm.Dataset(x, y, group=sizes, init_score=scores)
        booster = lightgbm.train(params, data, 1, valid_sets=[data], valid_names=["all"])
        return float(booster.best_score["all"]["ndcg@3"])

    return ndcg
