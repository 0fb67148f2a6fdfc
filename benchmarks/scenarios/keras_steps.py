"""Steps per second of Keras 3's `model.fit`, on each of its backends."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks._libraries import DRAWBAR, RAY_TRAIN
from benchmarks._scenario import Samples, Scenario
from benchmarks.scenarios import jax_steps, tensorflow_steps
from benchmarks.scenarios._processes import (
    CHUNK,
    CHUNKS,
    MEASURES,
    NOTE,
    WORKERS,
    fit_on_ray,
    run_bare,
)

BATCH = 256
HIDDEN = 256
RAYS_TRAINERS = {
    "torch": ("ray.train.torch", "TorchTrainer"),
    "jax": ("ray.train.v2.jax", "JaxTrainer"),
    "tensorflow": ("ray.train.tensorflow", "TensorflowTrainer"),
}

Reduce = Callable[[Any], Any]


def rows(count: int) -> tuple[Any, Any]:
    """Return random rows and their labels."""
    import numpy as np

    draw = np.random.default_rng(0)
    return draw.normal(size=(count, 128)).astype("float32"), draw.integers(0, 10, count)


def compiled() -> Any:
    """Make an MLP."""
    import keras

    keras.utils.set_random_seed(0)  # JAX's processes must begin with the same weights
    hidden = [keras.layers.Dense(HIDDEN, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((128,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    return model


def fit(model: Any, *data: Any, **options: Any) -> Samples:
    """Train for some epochs of `CHUNK` steps; the first is not counted."""
    import keras

    ends: list[float] = []
    ticks = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter())
    )
    model.fit(*data, epochs=1 + CHUNKS, verbose=0, callbacks=[ticks], **options)
    return {"rate": [CHUNK / (end - begin) for begin, end in pairwise(ends)]}


def train_on_drawbar() -> Samples:
    """Train as Drawbar's documentation has it."""
    from drawbar.keras import prepare_dataset, prepare_model

    one_torch_thread()
    data = prepare_dataset(*rows(BATCH * WORKERS * CHUNK), batch_size=BATCH * WORKERS)
    return fit(prepare_model(compiled()), data)


def train_by_hand(backend: str) -> Samples:
    """Train as one would write it without Drawbar: averaged gradients, each worker's own rows."""
    if backend == "jax":
        import jax
        import keras

        everywhere = keras.distribution.DataParallel(
            devices=jax.devices(), auto_shard_dataset=False
        )
        keras.distribution.set_distribution(everywhere)
    model = compiled()
    if backend != "jax":
        average_gradients(model, reduce_by_torch if backend == "torch" else reduce_by_tensorflow)
    return fit(model, *rows(BATCH * CHUNK), batch_size=BATCH, shuffle=False)


def average_gradients(model: Any, reduce: Reduce) -> None:
    """Let the optimizer apply the mean of all workers' gradients."""
    import keras

    model.jit_compile = False
    apply = model.optimizer.apply

    def apply_averaged(grads: Any, trainable_variables: Any = None) -> None:
        sizes = [math.prod(each.shape) for each in grads]
        flat = reduce(keras.ops.concatenate([keras.ops.ravel(each) for each in grads])) / WORKERS
        parts = keras.ops.split(flat, list(itertools.accumulate(sizes))[:-1])
        pairs = zip(parts, grads, strict=True)
        apply([keras.ops.reshape(part, each.shape) for part, each in pairs], trainable_variables)

    model.optimizer.apply = apply_averaged


def reduce_by_torch(flat: Any) -> Any:
    """Sum up over torch's processes."""
    import torch.distributed as dist

    dist.all_reduce(flat)
    return flat


def reduce_by_tensorflow(flat: Any) -> Any:
    """Sum up over TensorFlow's processes."""
    import tensorflow as tf

    return tf.raw_ops.CollectiveReduceV2(
        input=flat,
        group_size=WORKERS,
        group_key=1000,
        instance_key=1000,
        ordering_token=[],
        merge_op="Add",
        final_op="Id",
        communication_hint="RING",
    )


def train_bare(rank: int, addresses: list[str], backend: str) -> Samples:
    """Train as one plain process."""
    if backend == "torch":
        import torch.distributed as dist

        one_torch_thread()
        dist.init_process_group("gloo", f"tcp://{addresses[0]}", rank=rank, world_size=WORKERS)
    elif backend == "jax":
        jax_steps.meet(rank, addresses[0])
    else:
        tensorflow_steps.set_tf_config(rank, addresses)
        connect_tensorflow()
    return train_by_hand(backend)


def connect_tensorflow() -> None:
    """Connect this process to the processes of TF_CONFIG without TensorFlow's strategy."""
    import tensorflow as tf

    tf.distribute.MultiWorkerMirroredStrategy()


def one_torch_thread() -> None:
    """Compute with one thread, if it is torch that computes."""
    if os.environ["KERAS_BACKEND"] == "torch":
        import torch

        torch.set_num_threads(1)


def _train_on_ray(backend: str) -> Samples:
    os.environ["KERAS_BACKEND"] = backend
    if backend == "jax":
        jax_steps.meet_on_ray()
    elif backend == "tensorflow":
        connect_tensorflow()
    one_torch_thread()
    return train_by_hand(backend)


def _drawbar(backend: str) -> Samples:
    from drawbar.keras import KerasTrainer

    return fit_on_ray(DRAWBAR, KerasTrainer, train_on_drawbar, keras_backend=backend)


def _ray_train(backend: str) -> Samples:
    module, name = RAYS_TRAINERS[backend]
    trainer = getattr(importlib.import_module(module), name)
    return fit_on_ray(RAY_TRAIN, trainer, partial(_train_on_ray, backend))


def _scenario(backend: str) -> Scenario:
    bare = partial(run_bare, __name__, backend, variables={"KERAS_BACKEND": backend})
    return Scenario(
        name=f"keras_{backend}_steps",
        title=f"model.fit of Keras 3 on {backend}, a small MLP, 2 workers",
        note=(
            "bare: two plain processes, with an optimizer that averages gradients by hand, or with "
            "Keras's own distribution on JAX. ray.train has no trainer for Keras 3: the same "
            f"function on its trainer of the backend. {NOTE}"
        ),
        measures=MEASURES,
        sides={
            "drawbar": partial(_drawbar, backend),
            "ray.train": partial(_ray_train, backend),
            "bare": bare,
        },
    )


SCENARIOS = [_scenario(backend) for backend in RAYS_TRAINERS]
