"""A small network in Flax on scikit-learn's handwritten digits, its batches over all workers.

Stop it and run it again, or run it with more --epochs: it resumes from the latest checkpoint.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import linen
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from drawbar import train
from drawbar.jax import JaxTrainer, load_state, report_state
from drawbar.train.runs import get_default_storage_path

BATCH = 96  # over all workers


class Network(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Conv(16, (3, 3))(x))
        x = linen.max_pool(linen.relu(linen.Conv(32, (3, 3))(x)), (2, 2), (2, 2))
        return linen.Dense(10)(linen.relu(linen.Dense(64)(x.reshape(len(x), -1))))


def digits():
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    return train_test_split(images, labels.astype(np.int32), test_size=0.2, random_state=0)


def train_loop(config):
    x, x_test, y, y_test = digits()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))
    network, optimizer = Network(), optax.adam(config["lr"])

    @jax.jit
    def step(state, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], x, y)
        updates, moments = optimizer.update(gradients, state["optimizer"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, loss

    def loss_of(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(network.apply(params, x), y).mean()

    def first_state():
        params = network.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
        return {"params": params, "optimizer": optimizer.init(params)}

    state = jax.jit(first_state, out_shardings=whole)()
    saved = load_state(state)
    state, begin = (saved[0], saved[1]["epoch"] + 1) if saved else (state, 0)
    for epoch in range(begin, config["epochs"]):
        order = np.random.default_rng(epoch).permutation(len(x))
        losses = []
        for at in range(0, len(order) - BATCH + 1, BATCH):
            own = np.split(order[at : at + BATCH], jax.process_count())[jax.process_index()]
            batch = [jax.make_array_from_process_local_data(rows, part[own]) for part in (x, y)]
            state, loss = step(state, *batch)
            losses.append(loss)
        params = jax.tree.map(lambda array: array.addressable_data(0), state["params"])
        accuracy = (network.apply(params, x_test).argmax(1) == y_test).mean()
        loss = float(sum(losses)) / len(losses)
        report_state(state, {"epoch": epoch, "loss": loss, "accuracy": float(accuracy)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("num-workers", 2), ("epochs", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--storage-path", default=get_default_storage_path())
    args = parser.parse_args()
    config = {"epochs": args.epochs, "lr": 0.003}
    workers = train.ScalingConfig(num_workers=args.num_workers)
    run = train.RunConfig(name="digits-jax", storage_path=args.storage_path)
    result = JaxTrainer(
        train_loop, train_loop_config=config, scaling_config=workers, run_config=run
    ).fit()

    matplotlib.use("Agg")
    rows = result.metrics_dataframe.query("rank == 0")
    curves = rows.plot("epoch", ["loss", "accuracy"], subplots=True, grid=True)
    curves[0].figure.savefig(f"{result.path}/curves.png")
    print(f"{result.metrics}\n{result.checkpoint}\n{result.path}/curves.png")
