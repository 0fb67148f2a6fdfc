"""One script on every backend of Keras: replicas stay equal, a killed rank changes nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from drawbar.keras import (
    KerasTrainer,
    ReportCheckpointCallback,
    load_state,
    prepare_dataset,
    prepare_model,
)
from drawbar.keras._backend import KerasBackend
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig, get_context

EPOCHS = 4
FATAL_EPOCH = 2
ROWS = 512


def digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return images[:ROWS].astype(np.float32) / 16, labels[:ROWS].astype(np.int32)


def compiled(layers: list[Any]) -> Any:
    import keras

    model = keras.Sequential([keras.Input((64,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def with_weights_of_numpy(model: Any) -> Any:
    """So that all backends begin with the same ones; only rank 0 does, what others have counts not.

    JAX's processes have one model, which must be given the same weights by all of them.
    """
    draw = np.random.default_rng(0 if is_jax() else get_context().get_world_rank())
    model.set_weights([draw.normal(0, 0.1, each.shape) for each in model.get_weights()])
    return prepare_model(model)


def train_loop() -> dict[str, Any]:
    import keras

    x, y = digits()
    model = with_weights_of_numpy(
        compiled([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
    )
    begin = load_state(model)
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    model.fit(
        prepare_dataset(x, y, batch_size=64, shuffle=True),
        epochs=EPOCHS,
        initial_epoch=begin,
        verbose=0,
        callbacks=[stopping, killer(), ReportCheckpointCallback(callbacks=[stopping])],
    )
    loss, accuracy = model.evaluate(prepare_dataset(x, y, batch_size=96), verbose=0)
    return {
        "begin": begin,
        "backend": keras.backend.backend(),
        "weights": model.get_weights(),
        "evaluated": (loss, accuracy),
        "predicted": np.argmax(model.predict(x, verbose=0), axis=1),
        "best epoch": stopping.best_epoch,
        "own statistics": weights_with_own_statistics(x, y),
    }


def killer() -> Any:
    import keras

    current = [0]

    def begin(epoch: int, logs: Any) -> None:
        current[0] = epoch

    def end(batch: int, logs: Any) -> None:
        context = get_context()
        is_fatal = context.get_world_rank() == 1 and context.get_attempt() == 0
        if is_fatal and current[0] == FATAL_EPOCH and batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)  # rank 0 goes on into the next collective

    return keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_train_batch_end=end)


def weights_with_own_statistics(x: Any, y: Any) -> list[Any]:
    """Train what has statistics of its own and draws numbers, from weights of each rank's own."""
    import keras

    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), keras.layers.Dense(10)]
    model = prepare_model(compiled(layers))
    model.fit(prepare_dataset(x, y, batch_size=64), epochs=1, verbose=0)
    return [each for each in model.get_weights() if each.dtype == np.float32]


def is_jax() -> bool:
    return os.environ["KERAS_BACKEND"] == "jax"


def fit(path: Path, backend: KerasBackend, num_workers: int) -> Result:
    return KerasTrainer(
        train_loop,
        keras_backend=backend,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name=f"{backend}-{num_workers}",
            storage_path=path,
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()


def losses(result: Result) -> list[float]:
    return list(result.metrics_dataframe.query("rank == 0")["loss"])


@pytest.fixture(scope="module")
def alone(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fit(tmp_path_factory.mktemp("alone"), "torch", num_workers=1)


@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_two_workers_of_which_one_is_killed_train_as_one_process_does(
    backend: KerasBackend, alone: Result, tmp_path: Path
) -> None:
    disturbed = fit(tmp_path, backend, num_workers=2)
    (expected,) = alone.return_values
    assert losses(alone)[-1] < losses(alone)[0] / 2
    for found in disturbed.return_values:
        assert found["backend"] == backend
        assert found["begin"] == FATAL_EPOCH
        assert found["evaluated"] == pytest.approx(expected["evaluated"], 1e-3)
        assert (found["predicted"] == expected["predicted"]).mean() > 0.99
        assert found["best epoch"] == EPOCHS - 1
    first, second = disturbed.return_values
    for name in ("weights", "own statistics"):
        for one, other in zip(first[name], second[name], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
    assert losses(disturbed) == pytest.approx(losses(alone), 1e-3)
    assert disturbed.checkpoint is not None
    with disturbed.checkpoint.as_directory() as folder:
        assert Path(folder, "model.keras").exists()
