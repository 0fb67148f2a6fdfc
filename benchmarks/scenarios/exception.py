"""From `raise` on one rank to the exception in the driver, while the other rank trains on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from benchmarks._cluster import bare_actors, fresh_cluster
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import (
    Measure,
    Samples,
    Scenario,
    cost_over_bare,
    faster_than_ray_train,
)

STEP_SECONDS = 0.01


def _train_or_fail(rank: int, note: Path) -> NoReturn:
    """Record the time and raise on rank 1; continue with steps on all other ranks."""
    if rank == 1:
        note.write_text(repr(time.time()))
        raise RuntimeError("the loss is not a number")
    while True:
        time.sleep(STEP_SECONDS)


def _function(library: Library, note: Path) -> Callable[[], None]:
    def function() -> None:
        _train_or_fail(library.train.get_context().get_world_rank(), note)

    return function


def _fits(library: Library, repetitions: int) -> Samples:
    seconds = []
    with fresh_cluster() as storage:
        note = storage / "raised"
        for _ in range(repetitions):
            trainer = library.trainer(_function(library, note), storage=storage)
            try:
                trainer.fit()
            except library.train.TrainingFailedError:
                seconds.append(time.time() - float(note.read_text()))
    return {"raised": seconds}


def _drawbar() -> Samples:
    return _fits(DRAWBAR, repetitions=5)


def _ray_train() -> Samples:
    return _fits(RAY_TRAIN, repetitions=1)


def _bare() -> Samples:
    import ray

    seconds = []
    with fresh_cluster() as storage:
        note = storage / "raised"
        for _ in range(5):
            with bare_actors() as actors:
                calls = [
                    actor.call.remote(_train_or_fail, rank, note)
                    for rank, actor in enumerate(actors)
                ]
                [failed], _ = ray.wait(calls, num_returns=1)
                try:
                    ray.get(failed)
                except RuntimeError:
                    seconds.append(time.time() - float(note.read_text()))
    return {"raised": seconds}


SCENARIO = Scenario(
    name="exception",
    title="From an exception on one rank to the driver, 2 workers",
    note="bare: ray.get of the failed call raises; the other actor is left for later.",
    measures=(
        Measure(
            key="raised",
            label="from raise to fit() raising",
            goals=(cost_over_bare(), faster_than_ray_train(at_least=10)),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _bare},
)
