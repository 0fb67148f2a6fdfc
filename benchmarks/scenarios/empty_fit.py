"""Duration of a run whose function does nothing: start two workers, call each, stop them."""

from __future__ import annotations

import time

from benchmarks._cluster import bare_actors, fresh_cluster
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import (
    Measure,
    Samples,
    Scenario,
    cost_over_bare,
    faster_than_ray_train,
)


def _nothing() -> None:
    pass


def _fits(library: Library, repetitions: int) -> Samples:
    with fresh_cluster() as storage:
        seconds = []
        for _ in range(repetitions):
            trainer = library.trainer(_nothing, storage=storage)
            start = time.perf_counter()
            trainer.fit()
            seconds.append(time.perf_counter() - start)
    return {"first": seconds[:1], "warm": seconds[1:]}


def _drawbar() -> Samples:
    return _fits(DRAWBAR, repetitions=6)


def _ray_train() -> Samples:
    return _fits(RAY_TRAIN, repetitions=2)


def _bare() -> Samples:
    import ray

    seconds = []
    with fresh_cluster():
        for _ in range(6):
            start = time.perf_counter()
            with bare_actors() as actors:
                ray.get([actor.call.remote(_nothing) for actor in actors])
            seconds.append(time.perf_counter() - start)
    return {"first": seconds[:1], "warm": seconds[1:]}


SCENARIO = Scenario(
    name="empty_fit",
    title="fit() of an empty function, 2 workers",
    note="bare: two actors without a placement group are made, called once each, and killed.",
    measures=(
        Measure(
            key="first",
            label="first in a fresh cluster",
            goals=(cost_over_bare(), faster_than_ray_train()),
        ),
        Measure(
            key="warm",
            label="every later one in the same driver",
            goals=(cost_over_bare(at_most=1.5), faster_than_ray_train(at_least=6)),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _bare},
)
