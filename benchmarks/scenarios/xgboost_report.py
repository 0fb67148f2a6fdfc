"""Overhead of a report in each boosting round."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable

from benchmarks._cluster import fresh_cluster
from benchmarks._scenario import (
    Measure,
    Samples,
    Scenario,
    Side,
    cost_over_bare,
    faster_than_ray_train,
)

ROWS = 2000


def _loop(side: Side, rounds: int) -> Callable[[], list[float]]:
    """Make the training function: so many small rounds, each reported."""

    def function() -> list[float]:
        import numpy as np
        import xgboost

        callbacks = []
        if side != "bare":
            home = importlib.import_module(f"{side}.xgboost")
            callbacks = [home.RayTrainReportCallback(checkpoint_at_end=False)]
        rng = np.random.default_rng(0)
        matrix = xgboost.DMatrix(rng.normal(size=(ROWS, 10)), rng.integers(0, 2, ROWS))
        start = time.perf_counter()
        xgboost.train(
            {"objective": "binary:logistic", "max_depth": 3, "nthread": 1},
            matrix,
            rounds,
            evals=[(matrix, "train")],
            verbose_eval=False,
            callbacks=callbacks,
        )
        return [(time.perf_counter() - start) / rounds]

    return function


def _fit(side: Side, rounds: int) -> Samples:
    with fresh_cluster() as storage:
        name = "ray.train" if side == "ray.train" else "drawbar"
        train = importlib.import_module("ray.train" if name == "ray.train" else "drawbar.train")
        home = importlib.import_module(f"{name}.xgboost")
        result = home.XGBoostTrainer(
            _loop(side, rounds),
            scaling_config=train.ScalingConfig(num_workers=2),
            run_config=train.RunConfig(storage_path=str(storage)),
        ).fit()
        value = result.return_value
    return {"round": value}


def _drawbar() -> Samples:
    return _fit("drawbar", rounds=100)


def _ray_train() -> Samples:
    return _fit("ray.train", rounds=8)


def _bare() -> Samples:
    return _fit("bare", rounds=100)


SCENARIO = Scenario(
    name="xgboost_report",
    title="XGBoost: a round that is reported, 2 workers",
    note=(
        "Seconds per round of a tiny training; 100 rounds, 8 on ray.train, since each takes as "
        "long as its poll. bare: the same on Drawbar's workers without the callback."
    ),
    measures=(
        Measure(
            key="round",
            label="a round",
            goals=(faster_than_ray_train(at_least=20), cost_over_bare()),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _bare},
)
