"""Steps per second of a framework's own training loop: what its scenarios have in common.

A scenario is a module with a function `train(side)` that trains on two ranks with the framework's
Trainer, calls `Steps.tick` after each step, and returns `Steps.samples()`. Drawbar and `ray.train`
run that function on two workers; for "bare" torchrun runs it in two processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks._cluster import fresh_cluster
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import Goal, Measure, Samples, Scenario, Side, faster_than_ray_train

Train = Callable[[Side], Samples]

WORKERS = 2
THREADS = 1
WARM_UP = 30
CHUNKS = 10
CHUNK = 30
TOTAL = WARM_UP + CHUNKS * CHUNK


class Steps:
    """Counts `TOTAL` steps; gives the rate of every `CHUNK` after the first `WARM_UP`."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def tick(self) -> None:
        """Record the end of a step."""
        self._times.append(time.perf_counter())

    def samples(self) -> Samples:
        """Return the rates in steps per second."""
        ends = self._times[WARM_UP - 1 :: CHUNK]
        pairs = pairwise(ends)
        return {"rate": [CHUNK / (end - begin) for begin, end in pairs]}


def steps_scenario(name: str, title: str, train: Train) -> Scenario:
    """Return the scenario of a module-level `train` function."""
    return Scenario(
        name=name,
        title=title,
        note=(
            "bare: torchrun, without Ray. Every side runs with one torch thread per process. Two "
            "busy processes leave no core of a small machine to others, so run it on an idle one."
        ),
        measures=(
            Measure(
                key="rate",
                label="steps per second",
                unit="1/s",
                goals=(Goal(over="drawbar", under="bare", at_least=0.97),),
            ),
            Measure(
                key="fit",
                label="the whole fit()",
                sides=("drawbar", "ray.train"),
                goals=(faster_than_ray_train(),),
            ),
        ),
        sides={
            "drawbar": partial(_fit, DRAWBAR, train),
            "ray.train": partial(_fit, RAY_TRAIN, train),
            "bare": partial(_torchrun, train.__module__),
        },
    )


def train_in_one_thread(train: Train, side: Side) -> Samples:
    """Train with as many torch threads as every other side has."""
    import torch

    torch.set_num_threads(THREADS)
    return train(side)


def _fit(library: Library, train: Train) -> Samples:
    def function() -> Samples:
        return train_in_one_thread(train, library.side)

    with fresh_cluster(WORKERS) as storage:
        trainer = library.trainer(function, storage=storage, torch=True, workers=WORKERS)
        start = time.perf_counter()
        samples: Samples = trainer.fit().return_value
        return {**samples, "fit": [time.perf_counter() - start]}


def _torchrun(module: str) -> Samples:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "samples.json")
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
        script = ["-m", "benchmarks.scenarios._steps_script", module, str(answer)]
        subprocess.run([sys.executable, "-m", *launcher, *script], check=True)
        samples: Samples = json.loads(answer.read_text())
    return samples
