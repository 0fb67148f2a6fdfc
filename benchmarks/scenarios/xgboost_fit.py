"""A fit of XGBoost on 2 workers, beside other ways to have it and the library alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from benchmarks._cluster import fresh_cluster
from benchmarks._memory import peak_of_children
from benchmarks._scenario import Goal, Measure, Samples, Scenario, faster_than_ray_train

ROWS = 1_000_000
COLUMNS = 40
PIECES = 20
ROUNDS = 100
WORKERS = 2
PARAMS = {"objective": "binary:logistic", "tree_method": "hist", "max_depth": 6}


def pieces() -> Iterator[tuple[Any, Any]]:
    """Make the rows, the same on every side: features as float32, and labels."""
    import numpy as np

    for seed in range(PIECES):
        rng = np.random.default_rng(seed)
        features = rng.normal(size=(ROWS // PIECES, COLUMNS)).astype("float32")
        odds = features[:, 0] + features[:, 1] * features[:, 2]
        yield features, (rng.random(len(odds)) < 1 / (1 + np.exp(-odds))).astype("float32")


def dataset() -> Any:
    """Put the rows into Ray's object store."""
    import pyarrow as pa
    import ray.data

    def table(features: Any, label: Any) -> Any:
        columns = {f"f{column}": features[:, column] for column in range(COLUMNS)}
        return pa.table({**columns, "label": label})

    return ray.data.from_arrow([table(*piece) for piece in pieces()])


def _drawbar() -> Samples:
    with fresh_cluster() as storage:
        from drawbar.train import RunConfig, ScalingConfig
        from drawbar.xgboost import XGBoostTrainer

        trainer = XGBoostTrainer(
            params={**PARAMS, "nthread": 1},
            label_column="label",
            datasets={"train": dataset()},
            num_boost_round=ROUNDS,
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(storage_path=storage),
        )
        return _measured(trainer.fit)


def _ray_train() -> Samples:
    def function() -> None:
        import ray.train
        import xgboost

        frame = (
            ray.train.get_dataset_shard("train").materialize().to_pandas()
        )  # as its docs have it
        matrix = xgboost.DMatrix(frame.drop(columns="label"), frame["label"])
        booster = xgboost.train({**PARAMS, "nthread": 1}, matrix, ROUNDS)
        ray.train.report({"rounds": booster.num_boosted_rounds()})

    with fresh_cluster() as storage:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.xgboost import XGBoostTrainer

        trainer = XGBoostTrainer(
            function,
            datasets={"train": dataset()},
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(storage_path=str(storage)),
        )
        return _measured(trainer.fit)


def _dask() -> Samples:
    # By name, since dask has types for some of its functions only.
    arrays, distributed = (import_module(name) for name in ("dask.array", "distributed"))
    from xgboost import dask as dask_xgboost

    cluster = distributed.LocalCluster(
        n_workers=WORKERS, threads_per_worker=1, dashboard_address=None
    )
    with cluster, distributed.Client(cluster) as client:
        columns = zip(*pieces(), strict=True)
        whole = [
            arrays.concatenate([arrays.from_array(piece, chunks=-1) for piece in column])
            for column in columns
        ]
        features, label = client.persist(whole)
        distributed.wait([features, label])

        def fit() -> None:
            matrix = dask_xgboost.DaskQuantileDMatrix(client, features, label)
            dask_xgboost.train(client, {**PARAMS, "nthread": 1}, matrix, ROUNDS)

        return _measured(fit)


def _bare() -> Samples:
    import numpy as np
    import xgboost

    features, label = (np.concatenate(each) for each in zip(*pieces(), strict=True))
    start = time.perf_counter()
    matrix = xgboost.QuantileDMatrix(features, label, nthread=WORKERS)
    xgboost.train({**PARAMS, "nthread": WORKERS}, matrix, ROUNDS)
    return {"fit": [time.perf_counter() - start]}


def _measured(fit: Any) -> Samples:
    with peak_of_children() as peak:
        start = time.perf_counter()
        fit()
        return {"fit": [time.perf_counter() - start], "memory": [peak[0]]}


SCENARIO = Scenario(
    name="xgboost_fit",
    title="XGBoost: 100 rounds on 1,000,000 x 40, 2 workers of one thread",
    note=(
        "bare: xgboost.train in one process with two threads. From fit() to its return, process "
        "start included, with the rows in Ray's object store, in dask's workers, or in memory. "
        "Drawbar also evaluates and reports each round and saves the model; the others do not. "
        "Memory: what the largest worker has to itself; its half of the rows is 76 MB as float32."
    ),
    measures=(
        Measure(
            key="fit",
            label="fit",
            goals=(
                Goal(over="drawbar", under="bare", at_most=1.25),
                faster_than_ray_train(at_least=1.0),
                Goal(over="dask", under="drawbar", at_least=1.0),
            ),
        ),
        Measure(
            key="memory",
            label="peak private memory of a worker, MB",
            unit="",
            goals=(Goal(over="ray.train", under="drawbar"), Goal(over="dask", under="drawbar")),
            sides=("drawbar", "ray.train", "dask"),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "dask": _dask, "bare": _bare},
    timeout=600.0,
)
