"""XGBoost training on 2 workers, compared with other libraries and XGBoost alone."""

from __future__ import annotations

import time
from typing import Any

from benchmarks._boosting import (
    MEASURES,
    NOTE,
    ROUNDS,
    WORKERS,
    arrays,
    dask_arrays,
    fit_declared,
    fit_with_ray_train,
    measured,
)
from benchmarks._scenario import Samples, Scenario

PARAMS: dict[str, Any] = {
    "objective": "binary:logistic",
    "tree_method": "hist",
    "max_depth": 6,
    "nthread": 1,
}
QUIET: dict[str, Any] = {"verbose_eval": False}


def _drawbar() -> Samples:
    return fit_declared("xgboost", "XGBoostTrainer", PARAMS)


def _ray_train() -> Samples:
    def function() -> None:
        import ray.train
        import xgboost

        frame = (
            ray.train.get_dataset_shard("train").materialize().to_pandas()
        )  # as its docs have it
        matrix = xgboost.DMatrix(frame.drop(columns="label"), frame["label"])
        booster = xgboost.train(PARAMS, matrix, ROUNDS, evals=[(matrix, "train")], **QUIET)
        ray.train.report({"rounds": booster.num_boosted_rounds()})

    return fit_with_ray_train("xgboost", "XGBoostTrainer", function)


def _dask() -> Samples:
    from xgboost import dask as dask_xgboost

    with dask_arrays() as (client, features, label):

        def fit() -> None:
            matrix = dask_xgboost.DaskQuantileDMatrix(client, features, label)
            dask_xgboost.train(client, PARAMS, matrix, ROUNDS, evals=[(matrix, "train")], **QUIET)

        return measured(fit)


def _bare() -> Samples:
    import xgboost

    features, label = arrays()
    start = time.perf_counter()
    matrix = xgboost.QuantileDMatrix(features, label, nthread=WORKERS)
    params = {**PARAMS, "nthread": WORKERS}
    xgboost.train(params, matrix, ROUNDS, evals=[(matrix, "train")], **QUIET)
    return {"fit": [time.perf_counter() - start]}


SCENARIO = Scenario(
    name="xgboost_fit",
    title="XGBoost: 100 rounds on 1,000,000 x 40, 2 workers of one thread",
    note=f"bare: xgboost.train in one process with two threads. All evaluate each round. {NOTE}",
    measures=MEASURES,
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "dask": _dask, "bare": _bare},
    timeout=600.0,
)
