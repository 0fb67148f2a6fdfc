"""From the SIGKILL of one of two workers to the function running again on both."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._cluster import bare_actors, fresh_cluster, start_actor
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import (
    Measure,
    Samples,
    Scenario,
    cost_over_bare,
    faster_than_ray_train,
)

STEP_SECONDS = 0.01


def _train(rank: int, folder: Path) -> None:
    """Train without end the first time, until rank 1 dies; the second time say when it began."""
    killed = folder / "killed"
    if killed.exists():
        (folder / f"again-{rank}").write_text(repr(time.time()))
        return
    # Opening a FIFO waits for the other end: rank 1 dies only once rank 0 is in the function.
    with (folder / "both-run").open("w" if rank == 0 else "r"):
        pass
    if rank == 1:
        killed.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(STEP_SECONDS)


def _new_folder(parent: Path) -> Path:
    folder = Path(tempfile.mkdtemp(dir=parent))
    os.mkfifo(folder / "both-run")
    return folder


def _seconds(folder: Path) -> float:
    """Seconds from the kill to the last rank's first line."""
    again = [float(path.read_text()) for path in folder.glob("again-*")]
    return max(again) - float((folder / "killed").read_text())


def _function(library: Library, folder: Path) -> Callable[[], None]:
    def function() -> None:
        _train(library.train.get_context().get_world_rank(), folder)

    return function


def _fits(library: Library, repetitions: int) -> Samples:
    seconds = []
    with fresh_cluster() as storage:
        for _ in range(repetitions):
            folder = _new_folder(storage)
            function = _function(library, folder)
            library.trainer(function, storage=storage, max_failures=1).fit()
            seconds.append(_seconds(folder))
    return {"again": seconds}


def _drawbar() -> Samples:
    samples = _fits(DRAWBAR, repetitions=4)
    return {**samples, "beside_one": samples["again"]}


def _ray_train() -> Samples:
    return _fits(RAY_TRAIN, repetitions=1)


def _bare() -> Samples:
    with fresh_cluster() as storage:
        again = [_replace_the_dead(_new_folder(storage)) for _ in range(4)]
        start_one = [_start_one() for _ in range(4)]
    return {"again": again, "beside_one": start_one}


def _replace_the_dead(folder: Path) -> float:
    """Do the least that can be done: see the death, make one new actor, call it."""
    import ray

    with bare_actors() as actors:
        calls = [actor.call.remote(_train, rank, folder) for rank, actor in enumerate(actors)]
        ray.wait([calls[1]])
        replacement = start_actor()
        ray.get(replacement.call.remote(_train, 1, folder))
        ray.kill(replacement)
    return _seconds(folder)


def _start_one() -> float:
    import ray

    start = time.perf_counter()
    with bare_actors(1) as [actor]:
        ray.get(actor.call.remote(os.getpid))
        return time.perf_counter() - start


SCENARIO = Scenario(
    name="worker_killed",
    title="From SIGKILL of one of 2 workers to both running again",
    note=(
        "max_failures=1. bare: the driver sees the dead actor, makes one new actor and calls it; "
        "the other is left alone."
    ),
    measures=(
        Measure(
            key="again",
            label="from the kill to the last rank's first line",
            goals=(cost_over_bare(), faster_than_ray_train(at_least=8)),
        ),
        Measure(
            key="beside_one",
            label="the same, beside the start of one bare actor",
            goals=(cost_over_bare(at_most=1.3),),
            sides=("drawbar", "bare"),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _bare},
)
