"""LightGBM on 1,000,000 rows of 40 features: training with a report after each of 100 rounds."""

from __future__ import annotations

import importlib
import os
import resource
import time
import uuid
from dataclasses import dataclass
from typing import Any

from benchmarks._cluster import fresh_cluster
from benchmarks._scenario import (
    Goal,
    Measure,
    Samples,
    Scenario,
    cost_over_bare,
    faster_than_ray_train,
)

WORKERS = 2
ROWS = 1_000_000
FEATURES = 40
ROUNDS = 100
THREADS = max(1, (os.cpu_count() or 1) // WORKERS)
PARAMS = {"objective": "binary", "num_leaves": 63, "verbosity": -1}


def rows(part: int, parts: int) -> Any:
    """Make a part of the rows, the same for every side."""
    import numpy as np

    x = np.random.default_rng(part).normal(size=(ROWS // parts, FEATURES)).astype(np.float32)
    return x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype(np.float32)


def train(part: int, parts: int, params: dict[str, Any], callbacks: list[Any]) -> Samples:
    """Train on a part; seconds of data set and rounds, memory of the process over its rows."""
    import lightgbm

    x, y = rows(part, parts)
    raw = x.nbytes
    start = time.perf_counter()
    data = lightgbm.Dataset(x, y, free_raw_data=True)
    lightgbm.train({**PARAMS, **params}, data, ROUNDS, callbacks=callbacks)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"train": [seconds], "memory": [peak / raw]}


@dataclass(frozen=True)
class _Library:
    """Drawbar or `ray.train`, by the names of its modules."""

    train: str
    lightgbm: str

    def fit(self) -> Samples:
        def function() -> Samples:
            home = importlib.import_module(self.lightgbm)
            context = importlib.import_module(self.train).get_context()
            network = {"tree_learner": "data", "pre_partition": True, **home.get_network_params()}
            params = {**network, "num_threads": THREADS}
            callbacks = [home.RayTrainReportCallback(checkpoint_at_end=False)]
            rank, size = context.get_world_rank(), context.get_world_size()
            return train(rank, size, params, callbacks)

        api = importlib.import_module(self.train)
        with fresh_cluster() as storage:
            name = f"benchmark-{uuid.uuid4().hex[:8]}"
            trainer = importlib.import_module(self.lightgbm).LightGBMTrainer(
                function,
                scaling_config=api.ScalingConfig(num_workers=WORKERS),
                run_config=api.RunConfig(name=name, storage_path=str(storage)),
            )
            start = time.perf_counter()
            result = trainer.fit()
            seconds = time.perf_counter() - start
        samples: Samples = result.return_value
        return {**samples, "fit": [seconds]}


def _drawbar() -> Samples:
    return _Library("drawbar.train", "drawbar.lightgbm").fit()


def _ray_train() -> Samples:
    return _Library("ray.train", "ray.train.lightgbm").fit()


def _one_process() -> Samples:
    start = time.perf_counter()
    samples = train(0, 1, {"num_threads": THREADS * WORKERS}, [])
    return {**samples, "fit": [time.perf_counter() - start]}


SCENARIO = Scenario(
    name="lightgbm_fit",
    title=f"LightGBM, {ROWS:,} rows of {FEATURES}, {ROUNDS} rounds, a report each, 2 workers",
    note="bare: plain LightGBM in one process, with the threads of both workers.",
    measures=(
        Measure(
            key="train",
            label="data set and rounds",
            goals=(cost_over_bare(at_most=1.25), faster_than_ray_train(at_least=1)),
        ),
        Measure(key="fit", label="the whole of fit()", goals=(faster_than_ray_train(),)),
        Measure(
            key="memory",
            label="peak memory over the rows' float32",
            unit="",
            goals=(Goal(over="drawbar", under="ray.train"),),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _one_process},
    timeout=900.0,
)
