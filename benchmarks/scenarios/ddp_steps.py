"""DDP steps per second: the library must not be felt once the loop runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._cluster import fresh_cluster
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import Goal, Measure, Samples, Scenario

WORKERS = 2
WARM_UP = 30
CHUNKS = 10
CHUNK = 30
BATCH = 512
HIDDEN = 512
THREADS = 1


def train(model: Any) -> Samples:
    """Run 300 steps with a model that is already wrapped for DDP; return rates per 30 steps."""
    import torch

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    inputs, targets = torch.randn(BATCH, 128), torch.randint(0, 10, (BATCH,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def steps(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            loss: Any = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        return count / (time.perf_counter() - start)

    steps(WARM_UP)
    rates = [steps(CHUNK) for _ in range(CHUNKS)]
    omp = float(os.environ.get("OMP_NUM_THREADS", 0))
    return {"rate": rates, "threads": [float(torch.get_num_threads())], "omp": [omp]}


def mlp() -> Any:
    from torch import nn

    layers = [nn.Linear(128, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, 10))


def _fit(library: Library) -> Samples:
    def function() -> Samples:
        return train(library.torch.prepare_model(mlp()))

    with fresh_cluster(WORKERS) as storage:
        samples: Samples = library.trainer(function, storage=storage, torch=True).fit().return_value
    return samples


def _drawbar() -> Samples:
    return _fit(DRAWBAR)


def _ray_train() -> Samples:
    return _fit(RAY_TRAIN)


def _torchrun() -> Samples:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "samples.json")
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
        script = ["-m", "benchmarks.scenarios._ddp_script", str(answer)]
        subprocess.run([sys.executable, "-m", *launcher, *script], check=True)
        samples: Samples = json.loads(answer.read_text())
    return samples


SCENARIO = Scenario(
    name="ddp_steps",
    title="DDP steps of a small MLP, gloo, 2 workers",
    note=(
        "bare: torchrun, without Ray. Every side runs with one torch thread per process. Two "
        "busy processes leave no core of a small machine to others, so run it on an idle one."
    ),
    measures=(
        Measure(
            key="rate",
            label="steps per second",
            unit="1/s",
            goals=(
                Goal(over="drawbar", under="bare", at_least=0.98),
                Goal(over="drawbar", under="ray.train"),
            ),
        ),
        Measure(key="threads", label="torch threads per process", unit=""),
        Measure(key="omp", label="OMP_NUM_THREADS", unit=""),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _torchrun},
)
