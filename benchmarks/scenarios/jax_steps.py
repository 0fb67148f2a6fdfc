"""JAX steps per second over one mesh: the library must not be felt once the loop runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._cluster import fresh_cluster
from benchmarks._scenario import Goal, Measure, Samples, Scenario

WORKERS = 2
WARM_UP = 30
CHUNKS = 10
CHUNK = 30
BATCH = 256
HIDDEN = 256
THREADS = "1"


def train() -> Samples:
    """Take 300 steps on a batch that lies on all processes; rates per 30 steps."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    own = jax.random.normal(jax.random.key(jax.process_index()), (BATCH, 128))
    batch = jax.make_array_from_process_local_data(rows, own)
    shapes = [(128, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1)]

    def first() -> list[jax.Array]:
        return [0.05 * jax.random.normal(jax.random.key(0), shape) for shape in shapes]

    def loss(weights: list[jax.Array]) -> jax.Array:
        values = batch
        for weight in weights:
            values = jnp.tanh(values @ weight)
        return jnp.mean((values - 1) ** 2)

    @jax.jit
    def step(weights: list[jax.Array]) -> list[jax.Array]:
        return [one - 0.1 * by for one, by in zip(weights, jax.grad(loss)(weights), strict=True)]

    weights = jax.jit(first, out_shardings=NamedSharding(mesh, PartitionSpec()))()

    def steps(count: int) -> float:
        nonlocal weights
        start = time.perf_counter()
        for _ in range(count):
            weights = step(weights)
        jax.block_until_ready(weights)
        return count / (time.perf_counter() - start)

    steps(WARM_UP)
    return {"rate": [steps(CHUNK) for _ in range(CHUNKS)]}


def _drawbar() -> Samples:
    from drawbar.jax import JaxTrainer
    from drawbar.train import RunConfig, ScalingConfig

    with fresh_cluster(WORKERS) as storage:
        result = JaxTrainer(
            train,
            scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=storage),
        ).fit()
    samples: Samples = result.return_value
    return samples


def _bare() -> Samples:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "samples.json")
        script = [sys.executable, "-m", "benchmarks.scenarios._jax_script", address, str(answer)]
        environment = {**os.environ, "NPROC": THREADS, "JAX_PLATFORMS": "cpu"}
        processes = [
            subprocess.Popen([*script, str(rank)], env=environment) for rank in range(WORKERS)
        ]
        if any([process.wait() for process in processes]):
            raise RuntimeError("a process of plain JAX has failed; it said why above")
        samples: Samples = json.loads(answer.read_text())
    return samples


SCENARIO = Scenario(
    name="jax_steps",
    title="JAX steps of a small MLP over one mesh, gloo, 2 workers",
    note=(
        "bare: two processes with jax.distributed, without Ray; ray.train has no JAX over CPUs. "
        "Every side computes with one thread per process. Two busy processes leave no core of a "
        "small machine to others, so run it on an idle one."
    ),
    measures=(
        Measure(
            key="rate",
            label="steps per second",
            unit="1/s",
            goals=(Goal(over="drawbar", under="bare", at_least=0.95),),
        ),
    ),
    sides={"drawbar": _drawbar, "bare": _bare},
)
