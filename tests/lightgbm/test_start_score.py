"""Several workers have the same start score as one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest

from drawbar.lightgbm import RayTrainReportCallback
from drawbar.train import Result, WorkerGroupError


def metrics_of(result: Result) -> dict[str, Any]:
    assert result.metrics is not None
    return result.metrics


def booster_of(result: Result) -> lightgbm.Booster:
    assert result.checkpoint is not None
    return RayTrainReportCallback.get_model(result.checkpoint)


def alone(params: dict[str, Any], data: pd.DataFrame) -> tuple[lightgbm.Booster, list[float]]:
    """Train in one process. Return the booster and the loss of each round."""
    history: dict[str, Any] = {}
    train_set = lightgbm.Dataset(data[["x"]], data["y"], weight=data.get("w"))
    booster = lightgbm.train(
        {"verbosity": -1, **params},
        train_set,
        15,
        valid_sets=[train_set],
        callbacks=[lightgbm.record_evaluation(history)],
    )
    (losses,) = history["training"].values()
    return booster, losses


@pytest.mark.parametrize(
    "objective",
    [
        *("rmse", "huber", "fair", "poisson", "tweedie", "gamma"),
        *("cross_entropy", "xentlambda"),
    ],
)
def test_start_score_is_that_of_all_weighted_rows(
    declare: Callable[..., Result], objective: str
) -> None:
    y = np.linspace(0.01, 0.9, 200)
    data = pd.DataFrame({"x": np.arange(200) // 50, "y": y, "w": np.linspace(0.1, 5, 200)})
    if objective in ("rmse", "poisson"):
        data.loc[:120, "w"] = 0.0  # the first rank has no weight
    params = {"objective": objective, "reg_sqrt": objective == "rmse", "min_data_in_leaf": 1}
    result = declare(params, data, data, weight_column="w")
    plain, losses = alone(params, data)
    for rounds in (1, 15):
        predicted = booster_of(result).predict(data[["x"]], num_iteration=rounds)
        expected = plain.predict(data[["x"]], num_iteration=rounds)
        assert predicted == pytest.approx(expected, rel=1e-6)
    if objective != "xentlambda":  # several workers average this metric with other weights
        (name,) = (name for name in metrics_of(result) if name.startswith("valid-"))
        assert metrics_of(result)[name] == pytest.approx(losses[-1], rel=1e-6)


def test_start_score_is_the_whole_model_without_splits(declare: Callable[..., Result]) -> None:
    data = pd.DataFrame({"x": np.zeros(4), "y": [1.0, 2.0, 3.0, 9.0], "w": [1.0, 0.0, 0.0, 3.0]})
    booster = booster_of(declare({"objective": "poisson"}, data, weight_column="w"))
    assert booster.predict(data[["x"]]) == pytest.approx(7.0)


@pytest.mark.parametrize("objective", ["l1", "cross_entropy", "xentlambda"])
def test_worker_without_weight_raises_if_it_changes_the_model(
    declare: Callable[..., Result], objective: str
) -> None:
    data = pd.DataFrame({"x": [0.0], "y": [0.5]})  # the second worker has no rows
    with pytest.raises(WorkerGroupError, match=r"Ranks \[1\] have no rows with a weight above 0"):
        declare({"objective": objective}, data, num_workers=2)


@pytest.mark.parametrize(
    "params",
    [
        *({"objective": name} for name in ("regression", "huber", "fair", "poisson", "tweedie")),
        *({"objective": name} for name in ("gamma", "binary")),
        *({"objective": name, "num_class": 2} for name in ("multiclass", "multiclassova")),
    ],
    ids=lambda params: params["objective"],
)
def test_worker_without_rows_does_not_change_the_model(
    declare: Callable[..., Result], params: dict[str, Any]
) -> None:
    classes = [1.0, 0.0] if params["objective"] in ("binary", "multiclass", "multiclassova") else []
    data = pd.DataFrame({"x": [0.0, 1.0], "y": classes or [1.0, 3.0]})
    params = {**params, "min_data_in_leaf": 1, "min_sum_hessian_in_leaf": 0, "min_data_in_bin": 1}
    result = declare(params, data, num_workers=3)
    expected = alone(params, data)[0].predict(data[["x"]])
    assert booster_of(result).predict(data[["x"]]) == pytest.approx(expected, rel=1e-6)
