"""From the call of fit() to the first line of the user's function, on rank 0.

The torch variant measures the time to the first line after the gloo process group is set up, and to
the end of the first optimizer step: the first optimizer imports large modules of PyTorch.
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


def _step() -> tuple[float, float]:
    """Record the times of the first line and after the first optimizer step."""
    entered = time.time()
    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1)).backward()
    optimizer.step()
    return entered, time.time()


def _fits(library: Library, repetitions: int) -> Samples:
    samples: Samples = {"plain": [], "torch": [], "step": []}
    with fresh_cluster() as storage:
        for _ in range(repetitions):
            trainer = library.trainer(_now, storage=storage)
            start = time.time()
            samples["plain"].append(trainer.fit().return_value - start)
            trainer = library.trainer(_step, storage=storage, torch=True)
            start = time.time()
            entered, stepped = trainer.fit().return_value
            samples["torch"].append(entered - start)
            samples["step"].append(stepped - start)
    return samples


def _drawbar() -> Samples:
    return _fits(DRAWBAR, repetitions=3)


def _ray_train() -> Samples:
    return _fits(RAY_TRAIN, repetitions=1)


def _bare() -> Samples:
    samples: Samples = {"plain": [], "torch": [], "step": []}
    with fresh_cluster():
        for _ in range(3):
            samples["plain"].append(_bare_plain())
            entered, stepped = _bare_torch()
            samples["torch"].append(entered)
            samples["step"].append(stepped)
    return samples


def _bare_plain() -> float:
    import ray

    start = time.time()
    with bare_actors(WORKERS) as actors:
        entered: list[float] = ray.get([actor.call.remote(_now) for actor in actors])
    return entered[0] - start


def _bare_torch() -> tuple[float, float]:
    import ray

    start = time.time()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with bare_actors(WORKERS) as actors:
        calls = [actor.call.remote(_join, rank, address) for rank, actor in enumerate(actors)]
        entered, stepped = ray.get(calls)[0]
    return entered - start, stepped - start


def _join(rank: int, address: str) -> tuple[float, float]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORKERS)
    return _step()


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
        Measure(
            key="step",
            label="TorchTrainer, gloo, after the first optimizer step",
            goals=(cost_over_bare(), faster_than_ray_train()),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _bare},
)
