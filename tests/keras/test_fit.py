"""One script on every backend of Keras: replicas stay equal, a killed rank changes nothing.

Three workers train, of which one is killed in the middle of an epoch, and one process does.
"""

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

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept:DeprecationWarning"  # Keras, of TensorFlow
)

EPOCHS = 4
ROWS = 480
BATCH = 96  # over all workers, five times in an epoch
SAVED_EVERY = 3
FATAL_EPOCH, FATAL_BATCH = 2, 3  # the twelfth batch was saved, which is the second of that epoch
TURNS = [3.0, 1.0, 2.0, 4.0]  # the best epoch lies before the kill


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
    batches: list[int] = []
    others = [
        keras.callbacks.EarlyStopping("turn", patience=9, mode="min", restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("turn", patience=1, min_delta=0, mode="min"),
    ]
    history = model.fit(
        prepare_dataset(x, y, batch_size=BATCH, shuffle=True),
        epochs=EPOCHS,
        initial_epoch=begin,
        verbose=0,
        callbacks=[
            *(turning(), *others, killer(batches)),
            ReportCheckpointCallback({"train_batch_end": SAVED_EVERY}, callbacks=others),
        ],
    ).history
    return {
        "begin": begin,
        "batches": len(batches),
        "backend": keras.backend.backend(),
        "losses": history["loss"],
        "accuracies": history["accuracy"],
        "rates": history["learning_rate"],
        "weights": model.get_weights(),
        "evaluated": model.evaluate(prepare_dataset(x, y, batch_size=BATCH), verbose=0),
        "predicted": model.predict(x, verbose=0),
        "predicted by all": model.predict(prepare_dataset(x, batch_size=BATCH), verbose=0),
        "own statistics": weights_with_own_statistics(x, y),
    }


def turning() -> Any:
    """Give the logs a value that is best in an epoch before the kill."""
    import keras

    def end(epoch: int, logs: dict[str, float]) -> None:
        logs["turn"] = TURNS[epoch]

    return keras.callbacks.LambdaCallback(on_epoch_end=end)


def killer(batches: list[int]) -> Any:
    import keras

    current = [0]

    def begin(epoch: int, logs: Any) -> None:
        current[0] = epoch

    def end(batch: int, logs: Any) -> None:
        batches.append(batch)
        context = get_context()
        is_fatal = context.get_world_rank() == 1 and context.get_attempt() == 0
        if is_fatal and (current[0], batch) == (FATAL_EPOCH, FATAL_BATCH):
            os.kill(os.getpid(), signal.SIGKILL)  # the others go on into the next collective

    return keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_train_batch_end=end)


def weights_with_own_statistics(x: Any, y: Any) -> list[Any]:
    """Train what has statistics of its own and draws numbers, from weights of each rank's own."""
    import keras

    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), keras.layers.Dense(10)]
    model = prepare_model(compiled(layers))
    model.fit(prepare_dataset(x, y, batch_size=BATCH), epochs=1, verbose=0)
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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In this process, which has TensorFlow's Keras if it has any."""
    (value,) = fit(tmp_path_factory.mktemp("alone"), "tensorflow", num_workers=0).return_values
    return dict(value)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_three_workers_of_which_one_is_killed_train_as_one_process_does(
    backend: KerasBackend, alone: dict[str, Any], tmp_path: Path
) -> None:
    disturbed = fit(tmp_path, backend, num_workers=3)
    assert alone["losses"][-1] < 0.6 * alone["losses"][0]
    for found in disturbed.return_values:
        assert found["backend"] == backend
        assert found["begin"] == FATAL_EPOCH
        assert found["batches"] == 3 + 5  # those that were left of one epoch, and the next
        for name in ("losses", "accuracies", "rates"):
            assert found[name] == pytest.approx(alone[name][FATAL_EPOCH:], 1e-3)
        assert found["evaluated"] == pytest.approx(alone["evaluated"], 1e-3)
        for name in ("predicted", "predicted by all"):
            np.testing.assert_allclose(found[name], alone["predicted"], atol=1e-3)
        for one, best in zip(found["weights"], alone["weights"], strict=True):
            np.testing.assert_allclose(one, best, atol=1e-3)
    first, *others = disturbed.return_values
    for other in others:
        for name in ("weights", "own statistics"):
            for one, found in zip(first[name], other[name], strict=True):
                np.testing.assert_allclose(one, found, atol=1e-6)
    assert disturbed.checkpoint is not None
    with disturbed.checkpoint.as_directory() as folder:
        assert Path(folder, "model.keras").exists()
