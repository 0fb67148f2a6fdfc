"""Overhead of a Ray Tune trial that starts a run: time to the first line and to the end."""

from __future__ import annotations

import time
from typing import Any

from benchmarks._cluster import fresh_cluster
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import Measure, Samples, Scenario, faster_than_ray_train

TRIALS = 4


def _first_line() -> float:
    return time.time()


def _trial(config: dict[str, Any], library: Library, storage: Any) -> dict[str, float]:
    begin = time.time()
    trainer = library.trainer(_first_line, storage=storage)
    result = trainer.fit()
    return {"start": result.return_value - begin, "whole": time.time() - begin}


def _sweep(library: Library) -> Samples:
    from functools import partial

    from ray import tune

    from drawbar.train import ScalingConfig
    from drawbar.tune import as_placement_group_factory

    with fresh_cluster() as storage:
        trial: Any = partial(_trial, library=library, storage=storage)
        if library.side == "drawbar":
            trial = tune.with_resources(
                trial, as_placement_group_factory(ScalingConfig(num_workers=2))
            )
        grid = tune.Tuner(
            trial,
            tune_config=tune.TuneConfig(num_samples=TRIALS, max_concurrent_trials=1),
            run_config=tune.RunConfig(storage_path=str(storage), verbose=0),
        ).fit()
        found = [dict(grid[number].metrics or {}) for number in range(TRIALS)]
    return {key: [each[key] for each in found] for key in ("start", "whole")}


def _drawbar() -> Samples:
    return _sweep(DRAWBAR)


def _ray_train() -> Samples:
    return _sweep(RAY_TRAIN)


SCENARIO = Scenario(
    name="tune_trial",
    title="fit() of an empty function in a trial of Ray Tune, 2 workers, one trial after the other",
    note="the trial's own process is up when the clock starts.",
    measures=(
        Measure(
            key="start",
            label="from fit() to the first line on a worker",
            goals=(faster_than_ray_train(at_least=4),),
        ),
        Measure(
            key="whole",
            label="from fit() to its return",
            goals=(faster_than_ray_train(at_least=4),),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train},
)
