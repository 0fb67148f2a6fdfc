"""LightGBM training on 2 workers, compared with other libraries and LightGBM alone."""

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
    "objective": "binary",
    "num_leaves": 63,
    "verbosity": -1,
    "num_threads": 1,
}


def _drawbar() -> Samples:
    return fit_declared("lightgbm", "LightGBMTrainer", PARAMS)


def _ray_train() -> Samples:
    def function() -> None:
        import lightgbm
        import ray.train
        from ray.train.lightgbm import get_network_params

        shard = ray.train.get_dataset_shard("train")
        frame = shard.materialize().to_pandas().astype("float32")  # LightGBM takes no Arrow types
        network = {"tree_learner": "data", "pre_partition": True, **get_network_params()}
        rows = lightgbm.Dataset(frame.drop(columns="label"), frame["label"])
        booster = lightgbm.train({**PARAMS, **network}, rows, ROUNDS)
        ray.train.report({"rounds": booster.current_iteration()})

    return fit_with_ray_train("lightgbm", "LightGBMTrainer", function)


def _dask() -> Samples:
    from lightgbm import DaskLGBMClassifier

    params = {name: value for name, value in PARAMS.items() if name != "num_threads"}
    with dask_arrays() as (client, features, label):
        model = DaskLGBMClassifier(  # it takes the threads of dask's workers
            n_estimators=ROUNDS, tree_learner="data", client=client, **params
        )
        return measured(lambda: model.fit(features, label))


def _bare() -> Samples:
    import lightgbm

    features, label = arrays()
    start = time.perf_counter()
    params = {**PARAMS, "num_threads": WORKERS}
    lightgbm.train(params, lightgbm.Dataset(features, label), ROUNDS)
    return {"fit": [time.perf_counter() - start]}


SCENARIO = Scenario(
    name="lightgbm_fit",
    title="LightGBM: 100 rounds on 1,000,000 x 40, 2 workers of one thread",
    note=f"bare: lightgbm.train in one process with two threads. {NOTE}",
    measures=MEASURES,
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "dask": _dask, "bare": _bare},
    timeout=600.0,
)
