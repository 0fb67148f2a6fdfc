"""Protocols for the Keras classes in use. Keras ships no type hints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class Tensor(Protocol):
    """A tensor of Keras's backend."""

    @property
    def dtype(self) -> object: ...

    @property
    def shape(self) -> Sequence[int]: ...

    def __mul__(self, factor: float, /) -> Tensor: ...

    def __getitem__(self, index: slice, /) -> Tensor: ...


class Variable(Protocol):
    """A variable of a model."""

    @property
    def dtype(self) -> str: ...

    @property
    def value(self) -> Tensor: ...

    def numpy(self) -> Any: ...  # a NumPy array of any dtype

    def assign(self, value: object, /) -> object: ...


class Layer(Protocol):
    """A layer of a model."""

    name: str
    trainable: bool


class Optimizer(Protocol):
    """An optimizer."""

    variables: Sequence[Variable]
    apply: Callable[..., object]


class Model(Protocol):
    """A compiled model."""

    variables: Sequence[Variable]
    metrics_variables: Sequence[Variable]
    loss: object
    compile: Callable[..., object]
    train_step: Callable[..., object]
    test_step: Callable[..., object]
    train_function: object
    test_function: object
    predict_function: object
    jit_compile: object
    stop_training: bool
    steps_per_execution: int
    get_metrics_result: Callable[[], Mapping[str, object]]

    def get_weights(self) -> Sequence[object]: ...
