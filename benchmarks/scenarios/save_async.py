"""`save_async` of 500 MB: how long it stops training, and how much it slows training down."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks._cluster import fresh_cluster
from benchmarks._libraries import DRAWBAR
from benchmarks._scenario import Goal, Measure, Samples, Scenario

NBYTES = 500_000_000
TENSORS = 20
REPETITIONS = 9
WINDOW_SECONDS = 1.0
WORKERS = 2
HIDDEN = 512


def _measure_seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _make_step() -> Callable[[], None]:
    import torch

    model = torch.nn.Linear(HIDDEN, HIDDEN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(HIDDEN, HIDDEN)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()

    return step


def _function(nbytes: int) -> Samples:
    """Train on both cores; rank 0 returns the samples, without the first save."""
    import torch

    from drawbar import train
    from drawbar.torch import save_async

    torch.set_num_threads(1)
    step = _make_step()
    state = {f"layer{number}": torch.rand(nbytes // 4 // TENSORS) for number in range(TENSORS)}
    shards = _make_shards(state)
    target = {name: torch.zeros_like(value) for name, value in state.items()}

    def count_steps() -> float:
        count, end = 0, time.perf_counter() + WINDOW_SECONDS
        while time.perf_counter() < end:
            step()
            count += 1
        return count / WINDOW_SECONDS

    def copy() -> None:
        for name, value in state.items():
            target[name].copy_(value)

    def save_in_loop() -> None:
        with train.checkpoint_dir() as path:
            torch.save(state, path / "state.pt")
            train.report({}, checkpoint=path)

    samples: Samples = {}
    is_rank_zero = train.get_context().get_world_rank() == 0
    for repetition in range(REPETITIONS + 1):
        train.collective.barrier()
        alone, copied = count_steps(), _measure_seconds(copy)
        stall = save_async(state)
        with_writer = count_steps()
        train.get_all_reported_checkpoints()  # waits for the commit
        saved = _measure_seconds(save_in_loop if is_rank_zero else lambda: train.report({}))
        train.collective.barrier()
        copied_shards = _measure_seconds(copy)
        stall_of_shards = save_async(shards)
        train.get_all_reported_checkpoints()
        values = {"stall": stall, "copy": copied, "copies": stall / copied, "torch_save": saved}
        values |= {"alone": alone, "with_writer": with_writer, "slowdown": alone / with_writer}
        values |= {"shards": stall_of_shards, "shard_copies": stall_of_shards / copied_shards}
        for key, value in values.items() if repetition > 0 else ():
            samples.setdefault(key, []).append(value)
    return samples


def _make_shards(state: dict[str, Any]) -> dict[str, Any]:
    """Return DTensors of twice the size, of which each rank has the tensors of the state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (WORKERS,))
    return {name: DTensor.from_local(value, mesh, [Shard(0)]) for name, value in state.items()}


def _drawbar(nbytes: int = NBYTES) -> Samples:
    def function() -> Samples:
        return _function(nbytes)

    with fresh_cluster(WORKERS) as storage:
        trainer: Any = DRAWBAR.trainer(function, storage=storage, torch=True, workers=WORKERS)
        samples: Samples = trainer.fit().return_value
    return samples


SCENARIO = Scenario(
    name="save_async",
    title="save_async() of 500 MB by rank 0 of 2 workers, which keep 2 cores busy",
    note=(
        "All rows are measured in one process in turn, so that the load of the machine is the same "
        "for them. The first save, whose memory is new, is left out."
    ),
    measures=(
        Measure(key="stall", label="save_async(): training stopped"),
        Measure(key="copy", label="one copy of the tensors in memory"),
        Measure(
            key="copies",
            label="stall / copy",
            unit="",
            goals=(Goal(over="drawbar", at_most=1.2),),
        ),
        Measure(key="torch_save", label="torch.save() and report() in the loop"),
        Measure(key="alone", label="steps per second alone", unit="1/s"),
        Measure(key="with_writer", label="steps per second after save_async()", unit="1/s"),
        Measure(
            key="slowdown",
            label="step with the writer / alone",
            unit="",
            goals=(Goal(over="drawbar", at_most=1.05),),
        ),
        Measure(key="shards", label="save_async() of DTensors, 500 MB per rank"),
        Measure(
            key="shard_copies",
            label="stall / copy of DTensors",
            unit="",
            goals=(Goal(over="drawbar", at_most=1.2),),
        ),
    ),
    sides={"drawbar": _drawbar},
    timeout=600.0,
)
