"""JAX steps per second over one mesh: the library must not be felt once the loop runs."""

from __future__ import annotations

from functools import partial

from benchmarks._libraries import DRAWBAR, RAY_TRAIN
from benchmarks._scenario import Samples, Scenario
from benchmarks.scenarios._processes import (
    CHUNK,
    MEASURES,
    NOTE,
    WORKERS,
    chunk_rates,
    fit_on_ray,
    free_addresses,
    run_bare,
)

BATCH = 256
HIDDEN = 256


def train() -> Samples:
    """Run steps on a batch that is distributed over all processes."""
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

    def loss(weights: list[jax.Array], values: jax.Array) -> jax.Array:
        for weight in weights:
            values = jnp.tanh(values @ weight)
        return jnp.mean((values - 1) ** 2)

    @jax.jit
    def step(weights: list[jax.Array], values: jax.Array) -> list[jax.Array]:
        gradients = jax.grad(loss)(weights, values)
        return [one - 0.1 * by for one, by in zip(weights, gradients, strict=True)]

    weights = jax.jit(first, out_shardings=NamedSharding(mesh, PartitionSpec()))()

    def steps() -> None:
        nonlocal weights
        for _ in range(CHUNK):
            weights = step(weights, batch)
        jax.block_until_ready(weights)

    return chunk_rates(steps)


def train_bare(rank: int, addresses: list[str]) -> Samples:
    """Train as one process of a plain JAX program."""
    meet(rank, addresses[0])
    return train()


def meet(rank: int, address: str) -> None:
    """Make this process one of a JAX program's."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(address, WORKERS, rank, cluster_detection_method="deactivate")


def meet_on_ray() -> None:
    """Do it in a worker of `ray.train`, whose own trainer does it on TPUs and GPUs only."""
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    meet(get_context().get_world_rank(), broadcast_from_rank_zero(free_addresses()[0]))


def _train_on_ray() -> Samples:
    meet_on_ray()
    return train()


def _drawbar() -> Samples:
    from drawbar.jax import JaxTrainer

    return fit_on_ray(DRAWBAR, JaxTrainer, train)


def _ray_train() -> Samples:
    from ray.train.v2.jax import JaxTrainer

    return fit_on_ray(RAY_TRAIN, JaxTrainer, _train_on_ray)


SCENARIO = Scenario(
    name="jax_steps",
    title="JAX steps of a small MLP over one mesh, gloo, 2 workers",
    note=(
        "bare: two processes with jax.distributed, without Ray. On CPUs ray.train's workers are no "
        f"JAX program, so its function calls jax.distributed itself. {NOTE}"
    ),
    measures=MEASURES,
    sides={
        "drawbar": _drawbar,
        "ray.train": _ray_train,
        "bare": partial(run_bare, __name__),
    },
)
