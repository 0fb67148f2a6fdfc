"""From the call of fit() to the first line of the user's function, on rank 0.

The torch variant measures the time to the first line after the gloo process group is set up.
"""

from __future__ import annotations

import socket
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

WORKERS = 2


def _now() -> float:
    """Record the time of the first line of the training function."""
    return time.time()


def _fits(library: Library, repetitions: int) -> Samples:
    samples: Samples = {"plain": [], "torch": []}
    with fresh_cluster() as storage:
        for _ in range(repetitions):
            for key, seconds in samples.items():
                trainer = library.trainer(_now, storage=storage, torch=key == "torch")
                start = time.time()
                result = trainer.fit()
                seconds.append(result.return_value - start)
    return samples


def _drawbar() -> Samples:
    return _fits(DRAWBAR, repetitions=3)


def _ray_train() -> Samples:
    return _fits(RAY_TRAIN, repetitions=1)


def _bare() -> Samples:
    samples: Samples = {"plain": [], "torch": []}
    with fresh_cluster():
        for _ in range(3):
            samples["plain"].append(_bare_plain())
            samples["torch"].append(_bare_torch())
    return samples


def _bare_plain() -> float:
    import ray

    start = time.time()
    with bare_actors(WORKERS) as actors:
        entered: list[float] = ray.get([actor.call.remote(_now) for actor in actors])
    return entered[0] - start


def _bare_torch() -> float:
    import ray

    start = time.time()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with bare_actors(WORKERS) as actors:
        calls = [actor.call.remote(_join, rank, address) for rank, actor in enumerate(actors)]
        entered: list[float] = ray.get(calls)
    return entered[0] - start


def _join(rank: int, address: str) -> float:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORKERS)
    return time.time()


SCENARIO = Scenario(
    name="first_line",
    title="From fit() to the first line of the function, 2 workers",
    note="bare: two actors; with torch, each imports it and joins a gloo group at a free port.",
    measures=(
        Measure(
            key="plain",
            label="plain function",
            goals=(cost_over_bare(), faster_than_ray_train()),
        ),
        Measure(
            key="torch",
            label="TorchTrainer, gloo",
            goals=(cost_over_bare(), faster_than_ray_train()),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _bare},
)
