"""Private APIs of Keras: each test fails when Keras changes what `_compat` uses."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from drawbar.keras import _compat


@pytest.fixture
def keras() -> Any:
    return importlib.import_module("keras")


@pytest.fixture
def model(keras: Any) -> Iterator[Any]:
    inner = keras.Sequential([keras.layers.Dense(2), keras.layers.BatchNormalization()])
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    yield model
    _compat.restore_attributes()


def test_flatten_layers_returns_nested_layers_with_own_statistics(model: Any) -> None:
    layers = _compat.flatten_layers(model)
    statistics = {layer.name: len(_compat.get_own_statistics(layer)) for layer in layers}
    assert [count for count in statistics.values() if count] == [2]  # moving mean and variance


def test_batch_moments_return_mean_and_variance(keras: Any, model: Any) -> None:
    (layer,) = (
        layer
        for layer in _compat.flatten_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
    )
    moments, axes = _compat.get_batch_moments(layer)
    assert list(axes) == [0]
    mean, variance = moments(keras.ops.ones((4, 2)), None)
    assert (mean.shape, variance.shape) == ((2,), (2,))


def test_result_reader_returns_metrics(model: Any) -> None:
    model.evaluate(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    read: Any = _compat.get_result_reader(model)
    assert read(model.get_metrics_result()).keys() == {"loss", "mae"}
    assert read({"custom": 1.0}) == {"custom": 1.0}


def test_replaced_methods_are_called_by_fit_and_restored(model: Any) -> None:
    calls = []

    def record(name: str, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return method(*args, **options)

        return call

    for owner, name in (
        (model, "train_step"),
        (model.optimizer, "apply"),
        (model, "_get_metrics_result_or_logs"),
    ):
        _compat.replace_attribute(owner, name, record(name, getattr(owner, name)))
        assert _compat.is_replaced(owner, name)
    model.jit_compile = False
    model.train_function = None
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    assert {"train_step", "apply", "_get_metrics_result_or_logs"} == set(calls)
    calls.clear()
    _compat.restore_attributes()
    assert "train_step" not in vars(model)
    assert "apply" not in vars(model.optimizer)
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    assert calls == []


def test_replace_attribute_keeps_value_of_object(model: Any) -> None:
    def custom_step(data: object) -> dict[str, object]:
        return {}

    model.train_step = custom_step
    _compat.replace_attribute(model, "train_step", print)
    _compat.replace_attribute(model, "train_step", repr)
    _compat.restore_attributes()
    assert model.train_step is custom_step


def test_restore_in_another_thread_keeps_attributes(model: Any) -> None:
    _compat.replace_attribute(model, "train_step", print)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_compat.restore_attributes).result()
    assert model.train_step is print


def test_replace_attribute_that_keras_lacks_raises(model: Any) -> None:
    with pytest.raises(RuntimeError, match=r"Sequential of Keras .* has no unknown\(\)"):
        _compat.replace_attribute(model, "unknown", print)


def test_default_mark_is_read_by_callback_list(keras: Any) -> None:
    default = vars(keras.callbacks.Callback)["on_train_batch_end"]
    assert default._is_default is True


@pytest.mark.parametrize("name", ["saving.serialization_lib", "utils.rng_utils"])
def test_modules_with_delayed_tensorflow_have_it(keras: Any, name: str) -> None:
    module = importlib.import_module(f"keras.src.{name}")
    assert hasattr(module.tf, "available")


def test_seed_for_tensorflow_is_readable(keras: Any) -> None:
    assert callable(importlib.import_module("keras.src.utils.rng_utils").get_random_seed)


def test_variable_has_value_that_can_be_placed(keras: Any) -> None:
    variable = keras.Variable([1.0])
    value = keras.ops.convert_to_tensor([2.0])
    _compat.set_placed_value(variable, value)
    assert float(variable.value[0]) == 2.0
