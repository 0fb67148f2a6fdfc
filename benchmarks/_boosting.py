"""Data, systems, and timing of the boosting scenarios."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks._cluster import fresh_cluster
from benchmarks._memory import peak_of_children
from benchmarks._scenario import Goal, Measure, Samples, Side, faster_than_ray_train

ROWS = 1_000_000
COLUMNS = 40
PIECES = 20
ROUNDS = 100
WORKERS = 2

NOTE = (
    "From fit() to its return, with the rows in Ray's object store, in dask's workers, or in "
    "memory. Drawbar and ray.train start the workers' processes in that time, dask has its own "
    "before. Drawbar also reports each round and saves the model; the others do not. Memory: what "
    "the largest worker has to itself; its half of the rows is 76 MB as float32."
)


def pieces() -> Iterator[tuple[Any, Any]]:
    """Make the rows, the same on every side: features as float32, and labels."""
    import numpy as np

    for seed in range(PIECES):
        rng = np.random.default_rng(seed)
        features = rng.normal(size=(ROWS // PIECES, COLUMNS)).astype("float32")
        odds = features[:, 0] + features[:, 1] * features[:, 2]
        yield features, (rng.random(len(odds)) < 1 / (1 + np.exp(-odds))).astype("float32")


def arrays() -> tuple[Any, Any]:
    """Return all features and labels, in memory."""
    import numpy as np

    features, label = (np.concatenate(each) for each in zip(*pieces(), strict=True))
    return features, label


def dataset() -> Any:
    """Put the rows into Ray's object store."""
    import pyarrow as pa
    import ray.data

    def table(features: Any, label: Any) -> Any:
        columns = {f"f{column}": features[:, column] for column in range(COLUMNS)}
        return pa.table({**columns, "label": label})

    return ray.data.from_arrow([table(*piece) for piece in pieces()])


def fit_declared(library: str, trainer: str, params: dict[str, Any]) -> Samples:
    """Train with one of Drawbar's trainers that need no function.

    Args:
        library: "xgboost" or "lightgbm".
        trainer: Name of its trainer.
        params: The library's.
    """
    with fresh_cluster(WORKERS) as storage:
        from drawbar.train import RunConfig, ScalingConfig

        home = importlib.import_module(f"drawbar.{library}")
        ready = getattr(home, trainer)(
            params=params,
            label_column="label",
            datasets={"train": dataset()},
            num_boost_round=ROUNDS,
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(storage_path=storage),
        )
        return measured(ready.fit)


def fit_with_ray_train(library: str, trainer: str, function: Callable[[], None]) -> Samples:
    """Run a training function with one of `ray.train`'s trainers; arguments as above."""
    with fresh_cluster(WORKERS) as storage:
        from ray.train import RunConfig, ScalingConfig

        home = importlib.import_module(f"ray.train.{library}")
        ready = getattr(home, trainer)(
            function,
            datasets={"train": dataset()},
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(storage_path=str(storage)),
        )
        return measured(ready.fit)


@contextmanager
def dask_arrays() -> Iterator[tuple[Any, Any, Any]]:
    """Yield a client of single-threaded dask workers, and features and labels stored there."""
    # By name, since dask has types for some of its functions only.
    lazy, distributed = (importlib.import_module(name) for name in ("dask.array", "distributed"))
    cluster = distributed.LocalCluster(
        n_workers=WORKERS, threads_per_worker=1, dashboard_address=None
    )
    with cluster, distributed.Client(cluster) as client:
        columns = zip(*pieces(), strict=True)
        whole = [
            lazy.concatenate([lazy.from_array(piece, chunks=-1) for piece in column])
            for column in columns
        ]
        features, label = client.persist(whole)
        distributed.wait([features, label])
        yield client, features, label


def measured(fit: Callable[[], Any]) -> Samples:
    """Time a fit, and watch the memory of the processes that it starts."""
    with peak_of_children() as peak:
        start = time.perf_counter()
        fit()
        return {"fit": [time.perf_counter() - start], "memory": [peak[0]]}


DISTRIBUTED: tuple[Side, ...] = ("drawbar", "ray.train", "dask")

MEASURES = (
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
        sides=DISTRIBUTED,
    ),
)
