"""Steps per second of a loop under MultiWorkerMirroredStrategy."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any

from benchmarks._libraries import DRAWBAR, RAY_TRAIN
from benchmarks._scenario import Samples, Scenario
from benchmarks.scenarios._processes import (
    CHUNK,
    MEASURES,
    NOTE,
    chunk_rates,
    fit_on_ray,
    run_bare,
)

BATCH = 256
HIDDEN = 256


def train() -> Samples:
    """Run steps of an MLP in plain TensorFlow with `strategy.run`."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    shapes = [(128, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1)]
    with strategy.scope():
        weights = [
            tf.Variable(tf.random.stateless_normal(shape, (0, 0), stddev=0.05)) for shape in shapes
        ]
    batch = tf.random.stateless_normal((BATCH, 128), (1, 0))

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        def on_replica() -> Any:
            with tf.GradientTape() as tape:
                values = batch
                for weight in weights:
                    values = tf.tanh(values @ weight)
                loss = tf.reduce_mean((values - 1) ** 2)
            gradients = tape.gradient(loss, weights)
            everyones = tf.distribute.get_replica_context().all_reduce("mean", gradients)
            for weight, by in zip(weights, everyones, strict=True):
                weight.assign_sub(0.1 * by)
            return loss

        return strategy.run(on_replica)

    def steps() -> None:
        for _ in range(CHUNK):
            step()

    return chunk_rates(steps)


def train_bare(rank: int, addresses: list[str]) -> Samples:
    """Train as one process of plain TensorFlow."""
    set_tf_config(rank, addresses)
    return train()


def set_tf_config(rank: int, addresses: list[str]) -> None:
    """Set TF_CONFIG: addresses of all processes and the index of this one."""
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})


def _drawbar() -> Samples:
    from drawbar.tensorflow import TensorflowTrainer

    return fit_on_ray(DRAWBAR, TensorflowTrainer, train)


def _ray_train() -> Samples:
    from ray.train.tensorflow import TensorflowTrainer

    return fit_on_ray(RAY_TRAIN, TensorflowTrainer, train)


SCENARIO = Scenario(
    name="tensorflow_steps",
    title="TensorFlow steps of a small MLP under MultiWorkerMirroredStrategy, 2 workers",
    note=f"bare: two processes with TF_CONFIG, without Ray. {NOTE}",
    measures=MEASURES,
    sides={
        "drawbar": _drawbar,
        "ray.train": _ray_train,
        "bare": partial(run_bare, __name__),
    },
)
