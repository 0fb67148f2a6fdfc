"""A custom loop and a `fit` of Keras 2 under a strategy, with a rank killed in between.

One run has two workers, of which one is killed once; the other has one process. They train alike.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
import pytest

from drawbar import train
from drawbar.tensorflow import TensorflowTrainer, prepare_dataset_shard
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig

STEPS = 8
SAVED_AT = 3
FATAL_STEP = 5
ROWS = 32


def train_loop() -> dict[str, Any]:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return {
        "replicas": strategy.num_replicas_in_sync,
        "own loop": own_loop(strategy),
        "keras 2": keras_2_fit(strategy),
        "keras 3": why_keras_3_fails(strategy) if strategy.num_replicas_in_sync > 1 else "",
        "address": own_address(),
    }


def own_rows() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    context = train.get_context()
    own = slice(context.get_world_rank(), None, context.get_world_size())
    return x[own], x[own].sum(1, keepdims=True)


def own_loop(strategy: Any) -> list[float]:
    import tensorflow as tf

    with strategy.scope():
        weights = tf.Variable(tf.zeros((4, 1)))
    x, y = own_rows()

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        def on_replica() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weights - y) ** 2)
            (gradient,) = tape.gradient(loss, [weights])
            everyones = tf.distribute.get_replica_context().all_reduce("mean", gradient)
            weights.assign_sub(0.1 * everyones)
            return loss

        return strategy.reduce("mean", strategy.run(on_replica), axis=None)

    begin = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            weights.assign(np.load(Path(folder, "weights.npy")))
        begin = SAVED_AT + 1
    context = train.get_context()
    for number in range(begin, STEPS):
        metrics = {"step": number, "loss": step()}
        if number == FATAL_STEP and context.get_attempt() == 0 and context.get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # rank 0 continues to the next collective
        if number != SAVED_AT or context.get_world_rank() > 0:
            train.report(metrics)
            continue
        with train.checkpoint_dir() as path:
            np.save(path / "weights.npy", weights.numpy())
            train.report(metrics, checkpoint=path)
    return [float(each) for each in weights.numpy().ravel()]


def keras_2_fit(strategy: Any) -> list[float]:
    import tensorflow as tf

    from drawbar.train.tensorflow.keras import ReportCheckpointCallback

    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile("sgd", "mse")
    shard = tf.data.Dataset.from_tensor_slices(own_rows()).batch(ROWS)
    data = prepare_dataset_shard(shard)
    model.fit(data, epochs=3, verbose=0, callbacks=[ReportCheckpointCallback()])
    assert model.__module__.startswith("tf_keras")
    return [float(each) for each in model.get_weights()[0].ravel()]


def why_keras_3_fails(strategy: Any) -> str:
    """Return the error of Keras 3; test_backend.py tests the advice that it gets."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    shard = tf.data.Dataset.from_tensor_slices(own_rows()).batch(ROWS)
    try:
        model.fit(prepare_dataset_shard(shard), verbose=0)
    except ValueError as error:
        return str(error)
    return ""


def own_address() -> str:
    if "TF_CONFIG" not in os.environ:
        return ""
    found = json.loads(os.environ["TF_CONFIG"])
    return str(found["cluster"]["worker"][found["task"]["index"]])


def fit(path: Path, name: str, num_workers: int) -> Result:
    return TensorflowTrainer(
        train_loop,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name=name, storage_path=path, failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_cluster")
def test_restart_after_sigkill_matches_single_process(tmp_path: Path) -> None:
    disturbed = fit(tmp_path, "disturbed", num_workers=2)
    alone = fit(tmp_path, "alone", num_workers=1).return_values[0]
    assert alone["replicas"] == 1
    assert alone["address"]
    for found in disturbed.return_values:
        assert found["replicas"] == 2
        assert found["own loop"] == pytest.approx(alone["own loop"], 1e-5)
        assert found["keras 2"] == pytest.approx(alone["keras 2"], 1e-5)
        assert "PerReplica" in found["keras 3"]
    first, second = (found["address"] for found in disturbed.return_values)
    assert first != second
    rows = disturbed.metrics_dataframe.query("rank == 0")
    assert list(rows["step"].dropna()) == list(range(STEPS))
    saved = [checkpoint for checkpoint, _ in disturbed.best_checkpoints]
    assert [is_zipfile(Path(each, "model.keras")) for each in saved] == [False, True, True, True]
