"""Pause in training when an elastic run gains or loses a node."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._cluster import fresh_nodes
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import Measure, Samples, Scenario, faster_than_ray_train
from benchmarks._wait import becomes_true

STEP_SECONDS = 0.02
STEPS_PER_CHECKPOINT = 5
STEPS_PER_SIZE = 20
PATIENCE_SECONDS = 120.0


def _function(library: Library, folder: Path) -> Callable[[], None]:
    """Make a function that notes each step, and checkpoints so that the group can be resized."""

    def function() -> None:
        train = library.train
        rank = train.get_context().get_world_rank()
        size = train.get_context().get_world_size()
        while True:
            for _ in range(STEPS_PER_CHECKPOINT):
                time.sleep(STEP_SECONDS)
                with (folder / f"steps-of-{rank}").open("a") as steps:
                    steps.write(f"{time.time()} {size}\n")
            mine = folder / f"checkpoint-{rank}-{time.monotonic_ns()}"
            mine.mkdir()
            (mine / f"rank_{rank}").write_text("m")
            train.report({}, checkpoint=train.Checkpoint.from_directory(str(mine)))
            if library.collective.broadcast_from_rank_zero((folder / "enough").exists()):
                return

    return function


def _steps(folder: Path) -> list[tuple[float, int]]:
    """Return (time, world size) of all steps of all ranks, in order."""
    lines = [line for path in folder.glob("steps-of-*") for line in path.read_text().splitlines()]
    pairs = [line.split() for line in lines if " " in line]
    return sorted((float(when), int(size)) for when, size in pairs)


def _wait_for_size(folder: Path, size: int, since: float) -> None:
    def has_enough() -> bool:
        steps = [each for when, each in _steps(folder) if when > since]
        return steps.count(size) >= STEPS_PER_SIZE

    if not becomes_true(has_enough, within=PATIENCE_SECONDS):
        raise TimeoutError(f"no {STEPS_PER_SIZE} steps on {size} workers")


def _gap(folder: Path, size: int, since: float) -> float:
    """Return the seconds between the last step before a resize and the first step after it."""
    first = min(when for when, each in _steps(folder) if when > since and each == size)
    return first - max(when for when, _ in _steps(folder) if when < first)


def _kill_node(node: Any) -> None:
    import psutil

    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    for process in [*raylet.children(recursive=True), raylet]:
        os.kill(process.pid, signal.SIGKILL)


def _measure(library: Library) -> Samples:
    with fresh_nodes(1) as (folder, cluster):
        trainer = library.trainer(
            _function(library, folder), storage=folder, workers=(1, 2), max_failures=5
        )
        fit = threading.Thread(target=trainer.fit, daemon=True)
        fit.start()
        _wait_for_size(folder, 1, since=0)
        began = time.time()
        node = cluster.add_node(num_cpus=1)
        _wait_for_size(folder, 2, since=began)
        grow = _gap(folder, 2, since=began)
        killed = time.time()
        _kill_node(node)
        _wait_for_size(folder, 1, since=killed)
        shrink = _gap(folder, 1, since=killed)
        (folder / "enough").touch()
        fit.join(PATIENCE_SECONDS)
    return {"grow": [grow], "shrink": [shrink]}


def _drawbar() -> Samples:
    return _measure(DRAWBAR)


def _ray_train() -> Samples:
    return _measure(RAY_TRAIN)


SCENARIO = Scenario(
    name="resize",
    title="An elastic group of 1 to 2 workers gains a node and loses it",
    note=(
        "From the last step before to the first step after, on whichever rank. The node is lost by "
        "SIGKILL of all of its processes. How long a library takes to notice new room is not "
        "counted; ray.train looks for it once a minute."
    ),
    measures=(
        Measure(key="grow", label="1 to 2 workers", goals=(faster_than_ray_train(),)),
        Measure(key="shrink", label="2 to 1, its node is lost", goals=(faster_than_ray_train(),)),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train},
    timeout=400.0,
)
