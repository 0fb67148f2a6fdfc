"""Rows of each worker in a batch, and resume in mid-epoch or after early stopping."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.data
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drawbar.keras import (
    KerasTrainer,
    ReportCheckpointCallback,
    load_state,
    prepare_dataset,
    prepare_model,
)
from drawbar.train import (
    Checkpoint,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    get_context,
    get_dataset_shard,
)
from drawbar.train.runs import find_run
from drawbar.train.testing import run_in_threads

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:ray.data",  # it warns of itself
    "ignore:__array__ implementation doesn't accept:DeprecationWarning",  # Keras, of TensorFlow
)

ROWS = 40
BATCH = 8
IN_THE_MIDDLE, AT_THE_END = (1, 3), (0, 4)  # epoch and batch


@pytest.fixture(autouse=True)
def keras() -> Any:
    """Keras in this very process."""
    return importlib.import_module("keras")


def shared(prepare: Callable[[], Any], config: RunConfig) -> list[list[list[int]]]:
    """Return each rank's rows of each batch; rows are their own numbers."""

    def function() -> list[list[int]]:
        data = prepare()
        batches = data if hasattr(data, "__iter__") else (data[i] for i in range(len(data)))
        return [[int(row) for row in batch[0]] for batch in batches]

    result = run_in_threads(function, num_workers=2, run_config=config)
    return [list(each) for each in result.return_values]


def test_prepare_dataset_shards_array_batches(run_config: RunConfig) -> None:
    x = np.arange(9)
    first, second = shared(lambda: prepare_dataset(x, x, batch_size=4), run_config)
    assert first == [[0, 2], [4, 6], [8]]
    assert second == [[1, 3], [5, 7], []]


def test_prepare_dataset_shuffle_is_equal_on_all_ranks(run_config: RunConfig) -> None:
    x = np.arange(12)
    ranks = shared(lambda: prepare_dataset(x, x, batch_size=4, shuffle=True), run_config)
    rows = [row for rank in ranks for batch in rank for row in batch]
    assert sorted(rows) == list(range(12))
    assert rows != list(range(12))


def test_prepare_dataset_shards_data_loader(run_config: RunConfig) -> None:
    rows = TensorDataset(torch.arange(9), torch.arange(9))
    first, second = shared(lambda: prepare_dataset(DataLoader(rows, batch_size=4)), run_config)
    assert first == [[0, 2], [4, 6], [8]]
    assert second == [[1, 3], [5, 7], []]


def test_prepare_dataset_shards_tf_dataset(run_config: RunConfig) -> None:
    import tensorflow as tf

    def prepare() -> Any:
        rows = tf.data.Dataset.from_tensor_slices((tf.range(9), tf.range(9)))
        return prepare_dataset(rows.batch(4))

    first, second = shared(prepare, run_config)
    assert first == [[0, 2], [4, 6], [8]]
    assert second == [[1, 3], [5, 7], []]


def test_prepare_dataset_with_distribution_that_splits_raises(
    run_config: RunConfig, keras: Any
) -> None:
    def function() -> None:
        import tensorflow as tf

        mesh = keras.distribution.DeviceMesh((1,), ["batch"], ["cpu:0"])
        keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
        try:
            prepare_dataset(tf.data.Dataset.range(8).batch(4))
        finally:
            keras.distribution.set_distribution(None)

    with pytest.raises(TrainingFailedError, match=r"prepare_dataset\(\) would split it twice"):
        run_in_threads(function, num_workers=2, run_config=run_config)


def test_prepare_dataset_shards_py_dataset(run_config: RunConfig) -> None:
    x = np.arange(9)
    ranks = shared(lambda: prepare_dataset(batches_of(x, x, 4)), run_config)
    assert ranks == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], []]]


def test_prepare_dataset_supports_several_inputs(run_config: RunConfig) -> None:
    def function() -> list[float]:
        import keras

        inputs = [keras.Input((3,)), keras.Input((3,))]
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.add(inputs)))
        model.compile("sgd", "mse")
        x, y = table()
        data = prepare_dataset([x, x], y, batch_size=BATCH)
        return list(prepare_model(model).fit(data, verbose=0).history["loss"])

    (losses,) = run_in_threads(function, num_workers=1, run_config=run_config).return_values
    assert len(losses) == 1


def batches_of(x: Any, y: Any, size: int) -> Any:
    import keras

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
        def __len__(self) -> int:
            return -(-len(x) // size)

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            rows = slice(index * size, (index + 1) * size)
            return x[rows], y[rows]

    return Batches()


def test_prepare_dataset_with_invalid_arguments_raises(run_config: RunConfig) -> None:
    x = np.arange(8)
    cases = (
        (lambda: prepare_dataset(x, x, batch_size=1), "less than one row for each of 2 workers"),
        (lambda: prepare_dataset(x, x[:3]), r"the same number of rows, found \[3, 8\]"),
        (
            lambda: prepare_dataset(DataLoader(TensorDataset(torch.arange(8))), batch_size=4),
            "A DataLoader already defines targets",
        ),
        (lambda: prepare_dataset(x, sample_weight=x), r"sample_weight=...\) needs y"),
        (lambda: prepare_dataset(iter(x)), "data of known length, found .*iterator"),
        (lambda: prepare_dataset(DataLoader(Endless(), batch_size=2)), "dataset of known length"),
    )
    for number, (prepare, message) in enumerate(cases):
        config = replace(run_config, name=f"run-{number}")
        assert all(re.search(message, text) for text in refusals(prepare, config))


@pytest.mark.parametrize("is_positional", [False, True])
def test_fit_of_prepared_dataset_with_validation_split_raises(
    keras: Any, run_config: RunConfig, is_positional: bool
) -> None:
    def function() -> str:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        prepare_model(model)
        data = prepare_dataset(np.ones((8, 1)), np.ones(8), batch_size=4)
        # Positional arguments of `fit` after `x`; the last one is the split.
        arguments = (None, None, 1, 0, None, 0.5) if is_positional else ()
        options = {} if is_positional else {"validation_split": 0.5}
        with pytest.raises(ValueError, match="validation_split") as raised:
            model.fit(data, *arguments, **options)
        return str(raised.value)

    (text,) = run_in_threads(function, num_workers=1, run_config=run_config).return_values
    assert text.startswith("fit(validation_split=0.5) does not support prepare_dataset(). Split")


class Endless(IterableDataset[int]):
    """A dataset without a size."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def refusals(prepare: Callable[[], Any], config: RunConfig) -> list[str]:
    def function() -> str:
        with pytest.raises((TypeError, ValueError)) as raised:
            prepare()
        return str(raised.value)

    return run_in_threads(function, num_workers=2, run_config=config).return_values


def table() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    return x, x @ np.array([3, -1, 0.5], np.float32)


def of_arrays() -> Any:
    return prepare_dataset(*table(), batch_size=BATCH)


def of_arrays_in_any_order() -> Any:
    return prepare_dataset(*table(), batch_size=BATCH, shuffle=True)


def of_keras() -> Any:
    return prepare_dataset(batches_of(*table(), BATCH))


def of_tensorflow() -> Any:
    import tensorflow as tf

    return prepare_dataset(tf.data.Dataset.from_tensor_slices(table()).batch(BATCH))


def of_torch() -> Any:
    return prepare_dataset(DataLoader(of_tensors(), batch_size=BATCH))


def of_torch_in_any_order() -> Any:
    return prepare_dataset(DataLoader(of_tensors(), batch_size=BATCH, shuffle=True))


def of_tensors() -> TensorDataset:
    return TensorDataset(*map(torch.from_numpy, table()))


def of_shard() -> Any:
    return prepare_dataset(get_dataset_shard("train"), "y", batch_size=BATCH)


def of_shard_as_tensorflow() -> Any:
    return get_dataset_shard("train").to_tf("x", "y", batch_size=BATCH)


def rows_of_ray() -> Any:
    rows = [{"x": x, "y": y} for x, y in zip(*table(), strict=True)]
    # In one block: Ray Data gives several ones in any order.
    return ray.data.from_items(rows, override_num_blocks=1).materialize()


OF_SHARDS = (of_shard, of_shard_as_tensorflow)


def train_loop(config: dict[str, Any]) -> list[float]:
    """Fail once after a batch, if asked to; give each epoch's loss, and after."""
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    prepare_model(model)
    begin = load_state(model)
    epoch = [begin]
    fails_at = config["fails_at"] if get_context().get_attempt() == 0 else None

    def fail(batch: int, logs: Any) -> None:
        if (epoch[0], batch) == fails_at:
            raise ConnectionError("after a batch")

    watch = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda number, logs: epoch.__setitem__(0, number), on_train_batch_end=fail
    )
    save = ReportCheckpointCallback(["epoch_end", "train_batch_end"])
    data = config["prepare"]()
    history = model.fit(
        data, epochs=2, initial_epoch=begin, verbose=0, callbacks=[save, watch]
    ).history
    assert begin == (1 if get_context().get_attempt() else 0)
    return [*history["loss"], *([] if is_shard(config) else [model.evaluate(data, verbose=0)])]


def is_shard(config: dict[str, Any]) -> bool:
    return config["prepare"] in OF_SHARDS  # which has as many epochs as were asked for


def losses(
    prepare: Callable[[], Any], path: Path, fails_at: tuple[int, int] | None = None
) -> list[float]:
    result = KerasTrainer(
        train_loop,
        keras_backend="tensorflow",
        train_loop_config={"prepare": prepare, "fails_at": fails_at},
        datasets={"train": rows_of_ray()} if prepare in OF_SHARDS else None,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name=f"fails-{fails_at is not None}",
            storage_path=path,
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    return list(result.return_values[0])


@pytest.mark.parametrize(
    "prepare",
    [
        of_arrays,
        pytest.param(of_keras, marks=pytest.mark.nightly),
        pytest.param(of_tensorflow, marks=pytest.mark.nightly),
        pytest.param(of_torch, marks=pytest.mark.nightly),
        of_torch_in_any_order,
    ],
)
def test_fit_after_mid_epoch_checkpoint_resumes_mid_epoch(
    prepare: Callable[[], Any], tmp_path: Path
) -> None:
    undisturbed = losses(prepare, tmp_path)
    resumed = losses(prepare, tmp_path, IN_THE_MIDDLE)
    assert resumed == pytest.approx(undisturbed[1:], 1e-4)


def test_fit_resumed_after_last_batch_uses_next_epoch_order(
    tmp_path: Path,
) -> None:
    undisturbed = losses(of_arrays_in_any_order, tmp_path)
    resumed = losses(of_arrays_in_any_order, tmp_path, AT_THE_END)
    assert resumed == pytest.approx(undisturbed[1:], 1e-4)


def stopped_loop() -> tuple[list[int], Any, bool]:
    """Stop training after two epochs and fail there once. Return the epochs and weights."""
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    prepare_model(model)
    epochs: list[int] = []

    def fail(epoch: int, logs: Any) -> None:
        epochs.append(epoch)
        if model.stop_training and get_context().get_attempt() == 0:
            best.append(early.best_weights)
            raise ConnectionError("after the checkpoint")

    # The loss falls, so the first epoch's weights are the best ones.
    early = keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)
    save = ReportCheckpointCallback(["epoch_end", "train_end"])
    watch = keras.callbacks.LambdaCallback(on_epoch_end=fail)
    begin = load_state(model)
    callbacks = [save, early, watch]
    model.fit(of_arrays(), epochs=4, initial_epoch=begin, verbose=0, callbacks=callbacks)
    return epochs, model.get_weights(), model.stop_training


best: list[Any] = []
"""The best weights of an attempt that failed."""


def test_fit_after_early_stopping_trains_only_in_new_run(tmp_path: Path) -> None:
    def fit(name: str, checkpoint: Checkpoint | None = None) -> Result:
        failures = FailureConfig(max_failures=1)
        return KerasTrainer(
            stopped_loop,
            keras_backend="tensorflow",
            resume_from_checkpoint=checkpoint,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name=name, storage_path=tmp_path, failure_config=failures),
        ).fit()

    first = fit("stopped")
    ((epochs, weights, has_stopped),) = first.return_values
    assert (epochs, has_stopped) == ([], True)
    for found, expected in zip(weights, best.pop(), strict=True):
        np.testing.assert_array_equal(found, expected)
    unused = find_run(first.path).find_unused_files(num_to_keep=1)
    assert [Path(file.path).name for file in unused] == ["checkpoint_000001"]  # 0 is the best one
    another = fit("another", first.checkpoint)  # resumes from the last checkpoint
    assert another.metrics_dataframe["loss"].notna().sum() == 1


def scheduled_loop(fails_at: tuple[int, int] | None) -> Any:
    """Train with averaged weights and a learning rate that is halved in each epoch."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    model.compile(optimizer, "mse", jit_compile=False)
    prepare_model(model)
    at = [0, 0]

    def begin_epoch(epoch: int, logs: Any) -> None:
        at[0] = epoch

    def fail(batch: int, logs: Any) -> None:
        at[1] = batch
        if tuple(at) == fails_at and get_context().get_attempt() == 0:
            raise ConnectionError("after the checkpoint")

    callbacks = [
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
        ReportCheckpointCallback({"epoch_end": 1, "train_batch_end": 2}),
        keras.callbacks.LambdaCallback(on_epoch_begin=begin_epoch, on_train_batch_begin=fail),
    ]
    begin = load_state(model)
    model.fit(of_arrays(), epochs=3, initial_epoch=begin, verbose=0, callbacks=callbacks)
    return [each.tolist() for each in model.get_weights()], model.optimizer.learning_rate.numpy()


def test_averaged_weights_and_learning_rate_continue_after_restart(tmp_path: Path) -> None:
    def fit(fails_at: tuple[int, int] | None) -> Any:
        failures = FailureConfig(max_failures=1)
        config = RunConfig(name=f"{fails_at}", storage_path=tmp_path, failure_config=failures)
        return (
            KerasTrainer(
                functools.partial(scheduled_loop, fails_at),
                keras_backend="tensorflow",
                scaling_config=ScalingConfig(num_workers=0),
                run_config=config,
            )
            .fit()
            .return_value
        )

    (kernel, bias), rate = fit(None)
    for fails_at in ((1, 0), (1, 3)):  # resumes after an epoch, and in its middle
        (resumed_kernel, resumed_bias), resumed_rate = fit(fails_at)
        assert resumed_rate == pytest.approx(rate)
        assert resumed_bias == pytest.approx(bias)
        np.testing.assert_allclose(resumed_kernel, kernel, rtol=1e-5)


@pytest.mark.usefixtures("ray_cluster")
def test_prepare_dataset_shard_matches_arrays(tmp_path: Path) -> None:
    expected = losses(of_arrays, tmp_path / "arrays")[:2]
    for prepare in OF_SHARDS:
        first, second = losses(prepare, tmp_path / prepare.__name__)
        assert first == pytest.approx(expected[0], 1e-5)
        # Of TensorFlow's data Keras does not know the length, and asks for a step too many, which
        # the optimizer counts.
        tolerance = 1e-5 if prepare is of_shard else 1e-3
        assert second == pytest.approx(expected[1], tolerance)


@pytest.mark.usefixtures("ray_cluster")
def test_shard_resumed_mid_epoch_trains_batches_that_keras_had_read_ahead(tmp_path: Path) -> None:
    undisturbed = losses(of_shard, tmp_path)
    for fails_at in ((1, 1), IN_THE_MIDDLE):  # three batches are left, and one
        path = tmp_path / f"batch-{fails_at[1]}"
        assert losses(of_shard, path, fails_at) == pytest.approx(undisturbed[1:], 1e-4)
