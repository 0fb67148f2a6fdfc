"""Throughput of a streamed Ray Data dataset in a training function."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from benchmarks._cluster import bare_actors, fresh_cluster
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._memory import peak_of_children
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
PASSES = 3


def _dataset() -> Any:
    import ray.data

    rows = ray.data.range(ROWS, override_num_blocks=32)
    return rows.map_batches(_features)


def _features(batch: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    return {**batch, "x": np.repeat(batch["id"][:, None], 16, axis=1).astype(np.float32)}


def _read(shard: Any) -> dict[str, float]:
    """Read a worker's part several times; the first pass has the start of everything in it."""
    first, rates = 0.0, []
    for _ in range(PASSES):
        begin, rows = time.perf_counter(), 0
        for batch in shard.iter_batches(batch_size=1024):
            first = first or time.time()
            rows += len(batch["id"])
        rates.append(rows / (time.perf_counter() - begin))
    return {"first": first, "rate": sorted(rates)[len(rates) // 2]}


def _function(library: Library) -> dict[str, float]:
    return _read(library.train.get_dataset_shard("train"))


def _fit(library: Library) -> Samples:
    with fresh_cluster() as storage, peak_of_children() as peak:
        trainer = library.trainer(
            partial(_function, library), storage=storage, datasets={"train": _dataset()}
        )
        start = time.time()
        read = trainer.fit().return_value
    return {"rate": [read["rate"]], "first": [read["first"] - start], "memory": [peak[0]]}


def _drawbar() -> Samples:
    return _fit(DRAWBAR)


def _ray_train() -> Samples:
    return _fit(RAY_TRAIN)


def _bare() -> Samples:
    import ray

    with fresh_cluster(), peak_of_children() as peak:
        start = time.time()
        parts = _dataset().streaming_split(WORKERS, equal=True)
        with bare_actors(WORKERS) as actors:
            calls = [a.call.remote(_read, part) for a, part in zip(actors, parts, strict=True)]
            read = ray.get(calls)[0]
    return {"rate": [read["rate"]], "first": [read["first"] - start], "memory": [peak[0]]}


SCENARIO = Scenario(
    name="data_ingest",
    title=f"{ROWS:,} rows of Ray Data, streamed to 2 workers, {PASSES} passes",
    note="bare: two actors, each with its part of streaming_split. Drawbar keeps the rows' order.",
    measures=(
        Measure(
            key="rate",
            label="rows per second and worker",
            unit="1/s",
            goals=(
                Goal(over="drawbar", under="bare", at_least=0.97),
                Goal(over="drawbar", under="ray.train", at_least=0.97),
            ),
        ),
        Measure(
            key="first",
            label="from the start to the first batch",
            goals=(cost_over_bare(), faster_than_ray_train()),
        ),
        Measure(key="memory", label="largest process, MB", unit="", goals=(cost_over_bare(),)),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _bare},
)
