"""Killed ranks and a changed number of workers do not change the training result.

One run is never disturbed. The other fails in one process and resumes with two workers, of which
one is killed and replaced. One process loads its last checkpoint.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from drawbar import train
from drawbar.jax import JaxTrainer, load_state, report_state
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig, WorkerGroupError

STEPS = 12
SAVED_EVERY = 4
FATAL_STEPS = {1: 6, 2: 10}  # of one process, and of two workers
BATCH = 64


class Net(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(10)(linen.relu(linen.Dense(32)(x)))


def train_loop() -> dict[str, Any]:
    """Train with the weights sharded over the mesh, and each rank's own rows of each batch."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
    net, optimizer = Net(), optax.adam(0.01)
    state = place(mesh, first_state(net, optimizer))
    is_disturbed = train.get_context().get_experiment_name() == "disturbed"
    begin = 0
    if (saved := load_state(state)) is not None:
        state, begin = saved[0], saved[1]["step"] + 1
    update = jax.jit(lambda state, x, y: step(net, optimizer, state, x, y), donate_argnums=0)
    for number in range(begin, STEPS):
        state, loss = update(state, *batch(mesh, number))
        is_fatal = is_disturbed and FATAL_STEPS[jax.process_count()] == number
        if is_fatal and number - begin > SAVED_EVERY:  # not again, so soon after a restart
            die_on_last_rank()
        metrics = {"step": number, "loss": float(loss)}
        if number % SAVED_EVERY == SAVED_EVERY - 1:
            report_state(state, metrics)
        else:
            train.report(metrics)
    kernel = state["params"]["params"]["Dense_0"]["kernel"]
    return {
        "begin": begin,
        "processes": jax.process_count(),
        "sharded": len(kernel.addressable_shards) < len(kernel.global_shards),
        "kernel": np.concatenate([each.data for each in kernel.addressable_shards]),
    }


def first_state(net: Net, optimizer: optax.GradientTransformation) -> dict[str, Any]:
    params = net.init(jax.random.key(0), jnp.zeros((1, 64)))
    return {"params": params, "optimizer": optimizer.init(params)}


def place(mesh: Mesh, state: dict[str, Any]) -> Any:
    """Shard matrices by rows and replicate other arrays."""

    def put(leaf: jax.Array) -> jax.Array:
        spec = PartitionSpec("data") if leaf.ndim == 2 else PartitionSpec()
        value = np.asarray(leaf)
        return jax.make_array_from_callback(
            leaf.shape, NamedSharding(mesh, spec), value.__getitem__
        )

    return jax.tree.map(put, state)


def batch(mesh: Mesh, number: int) -> list[jax.Array]:
    random = np.random.default_rng(number)  # importing scikit-learn takes longer than training
    images, labels = random.random((BATCH, 64), np.float32), random.integers(0, 10, BATCH, np.int32)
    share = BATCH // jax.process_count()
    rows = slice(jax.process_index() * share, (jax.process_index() + 1) * share)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    own = (images[rows], labels[rows])
    return [jax.make_array_from_process_local_data(sharding, each) for each in own]


def step(
    net: Net, optimizer: optax.GradientTransformation, state: Any, x: jax.Array, y: jax.Array
) -> tuple[Any, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        logits = net.apply(params, x)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": moments}, loss


def die_on_last_rank() -> None:
    """Kill rank 1, while rank 0 is blocked in a collective, or raise an error in local mode."""
    if jax.process_count() == 1:
        raise InterruptedError
    if train.get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fit(path: Path, name: str, num_workers: int, max_failures: int) -> Result:
    return JaxTrainer(
        train_loop,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name=name,
            storage_path=path,
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    ).fit()


def losses(result: Result) -> list[float]:
    rows = result.metrics_dataframe.query("rank == 0")
    assert list(rows["step"]) == list(range(STEPS))
    return list(rows["loss"])


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_cluster")
def test_restart_with_other_number_of_workers_yields_same_losses(tmp_path: Path) -> None:
    undisturbed = fit(tmp_path, "undisturbed", num_workers=0, max_failures=0)  # in this process
    assert undisturbed.return_values[0]["processes"] == 1
    with pytest.raises(WorkerGroupError, match="InterruptedError"):
        fit(tmp_path, "disturbed", num_workers=0, max_failures=0)
    disturbed = fit(tmp_path, "disturbed", num_workers=2, max_failures=2)
    for value in disturbed.return_values:
        assert value["begin"] == 2 * SAVED_EVERY
        assert value["processes"] == 2
        assert value["sharded"]
    assert losses(disturbed) == pytest.approx(losses(undisturbed), 1e-4)
    loaded = fit(tmp_path, "disturbed", num_workers=0, max_failures=0).return_value
    assert loaded["begin"] == STEPS
    parts = [value["kernel"] for value in disturbed.return_values]
    np.testing.assert_array_equal(loaded["kernel"], np.concatenate(parts))
    assert disturbed.checkpoint is not None
    with disturbed.checkpoint.as_directory() as path:
        written = {each.name for each in Path(path, "state").glob("ocdbt.process_*")}
    assert written == {"ocdbt.process_0", "ocdbt.process_1"}  # each rank has written its own files
