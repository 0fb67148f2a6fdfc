"""Steps per second of frameworks that torchrun does not start: what their scenarios have in common.

A scenario's module has a function `train_bare(rank, addresses)`, in which plain processes meet at
addresses that they are given, and train. Drawbar and `ray.train` have a trainer for each framework.
As a module this file is one plain process: `MODULE ANSWER_FILE RANK ADDRESSES ARGUMENTS`.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks._cluster import fresh_cluster
from benchmarks._libraries import Library
from benchmarks._scenario import Goal, Measure, Samples, faster_than_ray_train

WORKERS = 2
CHUNKS = 10
CHUNK = 30
ONE_THREAD = {"NPROC": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
"""Of XLA and of TensorFlow, in each process of every side."""

NOTE = (
    "Every side computes with one thread per process. Two busy processes leave no core of a small "
    "machine to others, so run it on an idle one."
)

MEASURES = (
    Measure(
        key="rate",
        label="steps per second",
        unit="1/s",
        goals=(Goal(over="drawbar", under="bare", at_least=0.95),),
    ),
    Measure(
        key="fit",
        label="the whole fit()",
        sides=("drawbar", "ray.train"),
        goals=(faster_than_ray_train(),),
    ),
)


def chunk_rates(steps: Callable[[], object]) -> Samples:
    """Time `steps`, which takes `CHUNK` steps and waits for them; the first call is not counted."""
    steps()
    rates = []
    for _ in range(CHUNKS):
        start = time.perf_counter()
        steps()
        rates.append(CHUNK / (time.perf_counter() - start))
    return {"rate": rates}


def fit_on_ray(
    library: Library, trainer: Callable[..., Any], train: Callable[[], Samples], **options: object
) -> Samples:
    """Run `train` on two workers by a trainer's class; give its samples, and how long all took."""

    def function() -> Samples:
        os.environ.update(ONE_THREAD)
        return train()

    with fresh_cluster(WORKERS) as storage:
        made = trainer(
            function,
            scaling_config=library.train.ScalingConfig(num_workers=WORKERS),
            run_config=library.train.RunConfig(name="benchmark", storage_path=str(storage)),
            **options,
        )
        start = time.perf_counter()
        samples: Samples = made.fit().return_value
        return {**samples, "fit": [time.perf_counter() - start]}


def run_bare(module: str, *arguments: str, variables: Mapping[str, str] | None = None) -> Samples:
    """Run the module's `train_bare` in two plain processes; return the samples of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "samples.json")
        script = [sys.executable, "-m", "benchmarks.scenarios._processes", module, str(answer)]
        environment = {**os.environ, **ONE_THREAD, **(variables or {})}
        addresses = ",".join(free_addresses())
        processes = [
            subprocess.Popen([*script, str(rank), addresses, *arguments], env=environment)
            for rank in range(WORKERS)
        ]
        if any([process.wait() for process in processes]):
            raise RuntimeError("a plain process failed; its error is printed above")
        samples: Samples = json.loads(answer.read_text())
    return samples


def free_addresses() -> list[str]:
    """Return an address on this node for each worker."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(WORKERS)]
    found = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    return found


def main(module: str, answer: Path, rank: int, addresses: list[str], *arguments: str) -> None:
    """Train; rank 0 writes its samples."""
    samples = importlib.import_module(module).train_bare(rank, addresses, *arguments)
    if rank == 0:
        answer.write_text(json.dumps(samples))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(","), *sys.argv[5:])
