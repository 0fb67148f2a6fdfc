"""One script on every backend of Keras: replicas stay equal, a killed rank changes nothing.

One of two workers is killed in the middle of an epoch and replaced. With PyTorch, the other
process is reused. One process trains, too, on the same batches.
"""

from __future__ import annotations

import csv
import os
import signal
import sys
from pathlib import Path
from typing import Any, Literal

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
from drawbar.train import (
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    get_context,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept:DeprecationWarning"  # Keras, of TensorFlow
)

Backend = Literal["torch", "jax", "tensorflow"]

EPOCHS = 4
ROWS = 480
BATCH = 96  # over all workers, five times in an epoch
SAVED_EVERY = 3
FATAL_EPOCH, FATAL_BATCH = 2, 3  # the twelfth batch was saved, which is the second of that epoch
UNEVEN = 33  # rows, of which batches of 32 leave 1 for two workers
TURNS = [3.0, 1.0, 2.0, 4.0]  # the best epoch is before the kill


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


def train_loop(config: dict[str, Path]) -> dict[str, Any]:
    import keras

    x, y = digits()
    model = with_weights_of_numpy(
        compiled([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
    )
    begin = load_state(model)
    batches: list[int] = []
    others = [
        keras.callbacks.EarlyStopping("turn", patience=9, mode="min", restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("turn", patience=1, min_delta=1.5, mode="min"),
    ]
    written = [
        keras.callbacks.CSVLogger(config["folder"] / "log.csv"),
        keras.callbacks.ModelCheckpoint(config["folder"] / "newest.keras"),
    ]
    history = model.fit(
        prepare_dataset(x, y, batch_size=BATCH, shuffle=True),
        epochs=EPOCHS,
        initial_epoch=begin,
        verbose=0,
        callbacks=[
            *(turning(), *others, *written, killer(batches, begin)),
            ReportCheckpointCallback({"train_batch_end": SAVED_EVERY}),
        ],
    ).history
    newest = keras.models.load_model(config["folder"] / "newest.keras")
    return {
        "begin": begin,
        "batches": len(batches),
        "backend": keras.backend.backend(),
        "has tensorflow": "tensorflow" in sys.modules,
        "losses": history["loss"],
        "accuracies": history["accuracy"],
        "rates": history["learning_rate"],
        "steps": int(model.optimizer.iterations.numpy()),
        "weights": model.get_weights(),
        "newest": newest.get_weights(),
        "evaluated": model.evaluate(prepare_dataset(x, y, batch_size=BATCH), verbose=0),
        "predicted": model.predict(x, verbose=0),
        "predicted by all": model.predict(prepare_dataset(x, batch_size=BATCH), verbose=0),
        "own statistics": weights_with_own_statistics(x, y),
        "synchronized": train_synchronized_batch_norm(x, y),
        "own step": {} if is_jax() else trained_by_a_step_of_its_own(x, y),
        "uneven": trained_on_uneven_batches(model, x, y),
        "odd": [] if is_jax() else trained_in_odd_ways(x, y),
        "predicted one": model.predict(prepare_dataset(x[:1], batch_size=BATCH), verbose=0),
        "sum": told_of_a_sum(),
    }


def turning() -> Any:
    """Add a value to the logs that is best in an epoch before the kill."""
    import keras

    def end(epoch: int, logs: dict[str, float]) -> None:
        logs["turn"] = TURNS[epoch]

    return keras.callbacks.LambdaCallback(on_epoch_end=end)


def killer(batches: list[int], begin: int) -> Any:
    import keras

    current = [0]

    def begin_epoch(epoch: int, logs: Any) -> None:
        current[0] = epoch

    def end_batch(batch: int, logs: Any) -> None:
        batches.append(batch)
        is_fatal = get_context().get_world_rank() == 1 and begin == 0
        if is_fatal and (current[0], batch) == (FATAL_EPOCH, FATAL_BATCH):
            os.kill(os.getpid(), signal.SIGKILL)  # the others continue to the next collective

    return keras.callbacks.LambdaCallback(on_epoch_begin=begin_epoch, on_train_batch_end=end_batch)


def trained_on_uneven_batches(model: Any, x: Any, y: Any) -> list[float]:
    import keras

    data = prepare_dataset(x[:UNEVEN], y[:UNEVEN].tolist(), batch_size=32)
    epochs: list[int] = []
    seen = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    history = model.fit(data, None, None, 1, 0, [seen]).history
    assert epochs == [0]
    return [*history["loss"], *history["accuracy"], *model.evaluate(data, verbose=0)]


def trained_in_odd_ways(x: Any, y: Any) -> Any:
    """Train on rows of several shapes, by hand, on batches whose sizes change on some workers.

    A layer that is not trained has weights that are infinite on all ranks but the first.
    """
    import keras

    layers = keras.layers
    idle = layers.Dense(8, trainable=False, use_bias=False)
    model = compiled(
        [layers.Reshape((8, 8)), layers.Dense(4), layers.Flatten(), idle, layers.Dense(10)]
    )
    draw = np.random.default_rng(0)
    model.set_weights([draw.normal(0, 0.1, each.shape) for each in model.get_weights()])
    rank, size = get_context().get_world_rank(), get_context().get_world_size()
    if rank:
        idle.set_weights([np.full(idle.kernel.shape, -np.inf)])
    prepare_model(model)
    for rows in (32, 31):  # the second of two workers has one row less than before
        model.train_on_batch(x[:rows][rank::size], y[:rows][rank::size])
    model.compile("sgd", model.loss, metrics=[counter_of_rows()])
    counted = model.evaluate(prepare_dataset(x, y, batch_size=BATCH), verbose=0, return_dict=True)
    return [*model.get_weights(), counted["rows"]]


def counter_of_rows() -> Any:
    """Make a metric whose result is the variable that it adds to."""
    import keras

    class Rows(keras.metrics.Metric):  # type: ignore[misc]  # Keras has no types
        def __init__(self) -> None:
            super().__init__(name="rows")
            self.count = self.add_weight(shape=(), initializer="zeros")

        def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
            self.count.assign_add(keras.ops.cast(keras.ops.shape(y)[0], "float32"))

        def result(self) -> Any:
            return self.count.value

    return Rows()


def told_of_a_sum() -> str:
    import keras

    model = compiled([keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile("sgd", loss)
    try:
        prepare_model(model)
    except ValueError as error:
        return str(error)
    return ""


def weights_with_own_statistics(x: Any, y: Any) -> list[Any]:
    """Train layers with statistics and random numbers, from different weights on each rank."""
    import keras

    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), keras.layers.Dense(10)]
    model = prepare_model(compiled(layers))
    model.compile(keras.optimizers.Adam(0.01), model.loss)  # again, with another optimizer
    model.fit(prepare_dataset(x, y, batch_size=BATCH + 1), epochs=1, verbose=0)
    return [each for each in model.get_weights() if each.dtype == np.float32]


def train_synchronized_batch_norm(x: Any, y: Any) -> list[list[Any]]:
    """Return the weights after a full epoch and, except with JAX, after one of uneven batches.

    One of the two layers normalizes the timesteps that are not masked.
    """
    import keras

    is_tensorflow = os.environ["KERAS_BACKEND"] == "tensorflow"
    options = {"synchronized": True} if is_tensorflow else {}  # which the other backends refuse
    layers = keras.layers
    model = compiled(
        [
            layers.Reshape((8, 8)),
            layers.Masking(),
            layers.BatchNormalization(momentum=0.5, **options),
            layers.GlobalAveragePooling1D(),
            layers.Dense(16),
            layers.BatchNormalization(momentum=0.5, **options),
            layers.Dense(10),
        ]
    )
    draw = np.random.default_rng(0)
    model.set_weights([draw.uniform(0.1, 1, each.shape) for each in model.get_weights()])
    model.compile(keras.optimizers.SGD(0.1), model.loss)
    prepare_model(model, sync_batch_norm=not is_tensorflow)
    weights = []
    for rows in (ROWS,) if is_jax() else (ROWS, UNEVEN):
        data = prepare_dataset(x[:rows], y[:rows], batch_size=BATCH if rows == ROWS else 32)
        model.fit(data, epochs=1, verbose=0)
        weights.append(model.get_weights())
    return weights


def trained_by_a_step_of_its_own(x: Any, y: Any) -> dict[str, Any]:
    """Train with two optimizers, on batches of which the last has no row for some workers."""
    import keras

    class Model(keras.Model):  # type: ignore[misc]  # Keras has no types
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = keras.layers.Dense(16), keras.layers.Dense(10)
            adam, sgd = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)
            self.optimizers = {"hidden": adam, "out": sgd}
            self.tracker = keras.metrics.Mean(name="tracked")

        def call(self, x: Any) -> Any:
            return self.out(keras.ops.relu(self.hidden(x)))

        def train_step(self, data: Any) -> Any:
            loss, gradients = value_and_gradients(self, *data)
            half = len(self.hidden.trainable_weights)
            self.optimizers["hidden"].apply(gradients[:half], self.hidden.trainable_weights)
            self.optimizers["out"].apply(gradients[half:], self.out.trainable_weights)
            self.tracker.update_state(loss, keras.ops.shape(data[0])[0])
            return {"no metric": loss, "tracked": self.tracker.result()}

    model = Model()
    model(x[:1])  # builds it
    model.compile()
    with_weights_of_numpy(model)
    data = prepare_dataset(x[:UNEVEN], y[:UNEVEN], batch_size=32)
    history = model.fit(data, epochs=2, verbose=0).history
    return {
        "weights": model.get_weights(),
        "logs": [*history["no metric"], *history["tracked"]],
    }


def value_and_gradients(model: Any, x: Any, y: Any) -> tuple[Any, list[Any]]:
    import keras

    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if keras.backend.backend() == "torch":
        model.zero_grad()
        loss = loss_of(y, model(x))
        loss.backward()
        return loss.detach(), [each.value.grad for each in model.trainable_weights]
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x))
    return loss, tape.gradient(loss, model.trainable_weights)


def is_jax() -> bool:
    return os.environ["KERAS_BACKEND"] == "jax"


def fit(path: Path, backend: Backend, num_workers: int, max_failures: int = 1) -> Result:
    return KerasTrainer(
        train_loop,
        keras_backend=backend,
        train_loop_config={"folder": path},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name=backend,
            storage_path=path,
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    ).fit()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In this process, which has TensorFlow's Keras if it has any."""
    (value,) = fit(tmp_path_factory.mktemp("alone"), "tensorflow", num_workers=0).return_values
    return dict(value)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(900)  # three frameworks are imported in many processes
@pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param("jax", marks=pytest.mark.nightly),
        pytest.param("tensorflow", marks=pytest.mark.nightly),
    ],
)
def test_fit_with_killed_worker_matches_single_process(
    backend: Backend,
    alone: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    disturbed = fit(tmp_path, backend, num_workers=2)
    assert alone["losses"][-1] < 0.6 * alone["losses"][0]
    for found in disturbed.return_values:
        assert found["backend"] == backend
        assert found["has tensorflow"] == (backend == "tensorflow")
        assert found["begin"] == FATAL_EPOCH
        assert found["batches"] == 3 + 5  # those that were left of one epoch, and the next
        assert found["steps"] == alone["steps"] == EPOCHS * 5
        for name in ("losses", "accuracies", "rates"):
            assert found[name] == pytest.approx(alone[name][FATAL_EPOCH:], 1e-3)
        assert found["evaluated"] == pytest.approx(alone["evaluated"], 1e-3)
        for name in ("predicted", "predicted by all"):
            np.testing.assert_allclose(found[name], alone["predicted"], atol=1e-3)
        for name in ("weights", "newest"):
            assert_close(found[name], alone[name], 1e-3)
        for weights, expected in zip(found["synchronized"], alone["synchronized"], strict=False):
            assert_close(weights, expected, 1e-4)
    first, other = disturbed.return_values
    for name in ("weights", "own statistics"):
        assert_close(first[name], other[name], 1e-6)
    if backend != "jax":
        assert first["own step"]["logs"] == other["own step"]["logs"]
        assert first["own step"]["logs"] == pytest.approx(alone["own step"]["logs"], 1e-4)
        assert_close(other["own step"]["weights"], alone["own step"]["weights"], 1e-5)
        assert other["uneven"] == pytest.approx(alone["uneven"], 1e-3)
        assert_close(other["odd"], alone["odd"], 1e-5)
    np.testing.assert_allclose(other["predicted one"], first["predicted one"], atol=1e-6)
    assert other["predicted one"].shape == (1, 10)
    assert ("reduction='sum'" in other["sum"]) == (backend != "jax")
    output = capfd.readouterr().err
    for text in ("so JAX drops 1 rows of every batch", "some rows count several times"):
        assert (text in output) == (backend == "jax")
    assert ("BatchNormalization normalizes by the rows of one worker" in output) == (
        backend != "jax"
    )
    with (tmp_path / "log.csv").open() as log:
        assert [row["epoch"] for row in csv.DictReader(log)] == ["0", "1", "2", "3"]
    assert disturbed.checkpoint is not None
    with disturbed.checkpoint.as_directory() as folder:
        assert Path(folder, "model.keras").exists()


def assert_close(found: list[Any], expected: list[Any], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)
