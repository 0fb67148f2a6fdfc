"""Private APIs of Keras, and methods that Drawbar replaces; read in Keras 3.10 to 3.15.

Keras has no public API to act between the gradients and the optimizer, to read metrics over several
processes, or to normalize over them with every backend. Drawbar therefore replaces methods of
single models, optimizers, and layers. `restore_attributes` undoes this when the training function
ends. No other file of this package uses private APIs.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from drawbar.keras._types import Layer, Model, Variable

_MISSING = object()


class _Replaced(threading.local):
    """Replaced attributes of this thread, since ranks may be threads of one process.

    The values are those that the object itself had, if any.
    """

    def __init__(self) -> None:
        self.attributes: WeakKeyDictionary[object, dict[str, object]] = WeakKeyDictionary()


_replaced = _Replaced()


def replace_attribute(owner: object, name: str, value: object) -> None:
    """Replace an attribute of a model, optimizer, or layer until `restore_attributes`.

    Raises:
        RuntimeError: This version of Keras does not have the attribute.
    """
    if not hasattr(owner, name):
        import keras

        raise RuntimeError(
            f"{type(owner).__name__} of Keras {keras.__version__} has no {name}(), which Drawbar "
            "needs to train on several workers. Install an earlier version of Keras, or upgrade "
            "Drawbar."
        )
    own_values = _replaced.attributes.setdefault(owner, {})
    own_values.setdefault(name, vars(owner).get(name, _MISSING))
    setattr(owner, name, value)


def is_replaced(owner: object, name: str) -> bool:
    """Return whether `replace_attribute` has replaced an attribute in this thread."""
    return name in _replaced.attributes.get(owner, ())


def restore_attributes() -> None:
    """Undo all calls of `replace_attribute` of this thread."""
    for owner, attributes in list(_replaced.attributes.items()):
        for name, value in attributes.items():
            if value is not _MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
        if "train_step" in attributes:  # discard functions traced with the replaced methods
            vars(owner).update(train_function=None, test_function=None)
    _replaced.attributes.clear()


def flatten_layers(model: Model) -> list[Layer]:
    """Return all layers of a model, also nested ones. `Model.layers` has the outer ones only."""
    model_: Any = model
    return list(model_._flatten_layers())


def get_own_statistics(layer: Layer) -> Sequence[Variable]:
    """Return the non-trainable variables of a layer, without nested layers."""
    layer_: Any = layer
    variables: Sequence[Variable] = layer_._non_trainable_variables
    return variables


def get_result_reader(model: Model) -> Callable[[object], object]:
    """Return the method that chooses between the logs of a custom step and the metrics."""
    model_: Any = model
    reader: Callable[[object], object] = model_._get_metrics_result_or_logs
    return reader


def replace_result_reader(model: Model, reader: Callable[[object], object]) -> None:
    """Replace the method of `get_result_reader`."""
    replace_attribute(model, "_get_metrics_result_or_logs", reader)


def get_batch_moments(layer: Layer) -> tuple[Callable[[Any, Any], tuple[Any, Any]], Sequence[int]]:
    """Return the method of `BatchNormalization` for mean and variance, and the reduced axes."""
    layer_: Any = layer
    return layer_._moments, layer_._reduction_axes


def replace_batch_moments(layer: Layer, moments: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Replace the method of `get_batch_moments`."""
    replace_attribute(layer, "_moments", moments)


def set_placed_value(variable: Variable, value: object) -> None:
    """Set the array of a JAX variable as it is. `Variable.assign` would distribute it again."""
    variable_: Any = variable
    variable_._value = value


def mark_default(method: Callable[..., object]) -> None:
    """Mark a callback method as Keras's default, so that Keras does not wait for each batch."""
    method._is_default = True  # type: ignore[attr-defined]  # Keras's own mark


def delay_tensorflow_import() -> None:
    """Hide TensorFlow from Keras in this process until other code imports it.

    If TensorFlow is installed, Keras imports it with every backend, to set its seed and to check
    whether saved objects are TensorFlow's. This takes two seconds per worker and prints messages.
    If Keras's modules have other names, Keras imports TensorFlow as usual.
    """
    for name in ("saving.serialization_lib", "utils.rng_utils"):
        with contextlib.suppress(ImportError):
            module: Any = importlib.import_module(f"keras.src.{name}")
            module.tf = _LazyTensorFlow()
    sys.meta_path.insert(0, _SeedOnImportFinder())


class _LazyTensorFlow:
    """Replacement for the TensorFlow module in Keras."""

    @property
    def available(self) -> bool:
        return "tensorflow" in sys.modules

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("tensorflow"), name)


class _SeedOnImportFinder(MetaPathFinder):
    """Import hook that seeds TensorFlow with Keras's seed when it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == "tensorflow" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_seed(module: Any) -> None:
            execute(module)
            seed = importlib.import_module("keras.src.utils.rng_utils").get_random_seed()
            if seed is not None:
                module.random.set_seed(seed)

        spec.loader.exec_module = execute_and_seed  # type: ignore[method-assign]
        return spec
