"""Keep model replicas equal with the torch and tensorflow backends.

Rank 0's weights are copied to all ranks at the start. After that, every step keeps them equal:
gradients are averaged before the optimizer uses them, weighted by the rows of each rank. The same
collective averages statistics of layers such as BatchNormalization. Metrics are summed when they
are read, at the end of an epoch and of `evaluate`. A rank that has no rows of a batch computes a
row of zeros with weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from drawbar.keras._allreduce import AllReduce, to_numpy
from drawbar.keras._compat import (
    flatten_layers,
    get_own_statistics,
    get_result_reader,
    is_replaced,
    replace_attribute,
    replace_result_reader,
)
from drawbar.keras._progress import model_state
from drawbar.keras._types import Model, Optimizer, Tensor, Variable
from drawbar.train import collective, get_context

Step = Callable[[Any], object]


def broadcast_weights(model: Model, totals: AllReduce) -> None:
    """Copy rank 0's weights and optimizer state to all ranks."""
    states = [variable for optimizer in _find_optimizers(model) for variable in optimizer.variables]
    variables, is_rank_zero = [*model.variables, *states], get_context().get_world_rank() == 0
    floats = [variable for variable in variables if "float" in variable.dtype]
    # Use zeros_like instead of multiplying by 0, since infinite values would become NaN.
    values = [
        variable.value if is_rank_zero else keras.ops.zeros_like(variable.value)
        for variable in floats
    ]
    for variable, value in zip(floats, totals(values), strict=True):
        variable.assign(value)
    # Counters and seeds.
    others = [variable for variable in variables if "float" not in variable.dtype]
    arrays = collective.broadcast_from_rank_zero([variable.numpy() for variable in others])
    for variable, array in zip(others, arrays, strict=True):
        variable.assign(array)


def synchronize_replicas(model: Model, totals: AllReduce) -> None:
    """Make every step keep the replicas equal, also after the model is compiled again."""
    compile = model.compile

    def compile_and_average(*args: object, **options: object) -> None:
        compile(*args, **options)
        require_mean_losses(model)
        _patch_optimizers(model, totals)

    replace_attribute(model, "compile", compile_and_average)
    _track_batch_rows(model)
    _patch_optimizers(model, totals)
    _patch_metrics(model, totals)


def require_mean_losses(model: Model) -> None:
    """Reject losses that are sums over rows, because gradients of workers are averaged.

    Raises:
        ValueError: The model has a loss with `reduction="sum"`.
    """
    for loss in keras.tree.flatten(model.loss):
        if getattr(loss, "reduction", None) == "sum":
            raise ValueError(
                f"Loss {getattr(loss, 'name', loss)!r} uses reduction='sum', but the workers' "
                "gradients are averaged. Use reduction='sum_over_batch_size' and multiply the "
                "learning rate by the batch size."
            )


def _find_optimizers(model: object) -> list[Optimizer]:
    """Return all optimizers of a model, including additional ones of a subclass."""
    optimizers: dict[int, Optimizer] = {}
    for attribute in vars(model).values():
        items = attribute.values() if isinstance(attribute, Mapping) else attribute
        for item in items if isinstance(attribute, Mapping | list | tuple) else [attribute]:
            if isinstance(item, keras.optimizers.Optimizer):
                optimizers[id(item)] = item
    return list(optimizers.values())


def _track_batch_rows(model: Model) -> None:
    """Record in each step how many rows of the batch this worker has; it may have none."""
    state = model_state(model)
    state.last_rows = keras.Variable(1.0, trainable=False, name="last_rows")
    read = get_result_reader(model)

    def with_row_count(run: Step) -> Step:
        def step(data: object) -> object:
            parts = (part for part in keras.tree.flatten(data) if part is not None)
            state.rows = rows = keras.ops.shape(next(parts))[0]
            has_rows = isinstance(rows, int) and rows > 0  # unknown in TensorFlow's graphs
            try:
                logs = run(data) if has_rows else read(_run_on_empty_batch(model, run, data, rows))
            finally:
                state.rows = None
            state.last_rows.assign(keras.ops.cast(rows, "float32"))
            return logs

        return step

    replace_attribute(model, "train_step", with_row_count(model.train_step))
    replace_attribute(model, "test_step", with_row_count(model.test_step))
    model.test_function = None  # discard a function traced with the old test_step


def _run_on_empty_batch(model: Model, run: Step, data: object, rows: Any) -> object:
    """Run a step on a row of zeros if the batch has no rows, and keep the metrics unchanged."""

    def or_zeros(part: Any) -> Any:
        def zeros() -> object:
            return keras.ops.zeros((1, *keras.ops.shape(part)[1:]), part.dtype)

        return None if part is None else keras.ops.cond(rows == 0, zeros, lambda: part)

    before = [(variable, keras.ops.copy(variable.value)) for variable in model.metrics_variables]
    logs = run(keras.tree.map_structure(or_zeros, data))
    for variable, value in before:
        variable.assign(keras.ops.where(rows == 0, value, variable.value))
    return logs


def _patch_optimizers(model: Model, totals: AllReduce) -> None:
    if keras.backend.backend() == "tensorflow":
        model.jit_compile = False  # XLA does not support TensorFlow's collectives
    model.train_function = None  # discard a function traced without averaging
    for optimizer in _find_optimizers(model):
        if not is_replaced(optimizer, "apply"):
            averaged = _with_averaged_gradients(optimizer.apply, model, totals)
            replace_attribute(optimizer, "apply", averaged)


def _with_averaged_gradients(
    apply: Callable[..., object], model: Model, totals: AllReduce
) -> Callable[..., None]:
    def apply_averaged(grads: Sequence[Tensor | None], trainable_variables: object = None) -> None:
        statistics = _layer_statistics(model)
        gradients = [gradient for gradient in grads if gradient is not None]
        rows = model_state(model).rows
        means = iter(
            totals(
                [*gradients, *(variable.value for variable in statistics)],
                weight=1 if rows is None else rows,
            )
        )
        averaged = [None if gradient is None else next(means) for gradient in grads]
        apply(averaged, trainable_variables)
        for variable, value in zip(statistics, means, strict=True):
            variable.assign(value)

    return apply_averaged


def _layer_statistics(model: Model) -> list[Variable]:
    """Return the non-trainable float variables of trainable layers, such as moving averages."""
    return [
        variable
        for layer in flatten_layers(model)
        if layer.trainable
        for variable in get_own_statistics(layer)
        if "float" in variable.dtype
    ]


def _patch_metrics(model: Model, totals: AllReduce) -> None:
    result = get_result_reader(model)

    def global_results(logs: object) -> object:
        are_metrics = result(logs) is not logs
        metrics, variables = _metric_values(model), model.metrics_variables
        local_values = [variable.numpy() for variable in variables]
        for variable, value in zip(
            variables, totals([variable.value for variable in variables]), strict=True
        ):
            variable.assign(value)
        try:
            global_metrics = _metric_values(model)
        finally:
            for variable, value in zip(variables, local_values, strict=True):
                variable.assign(value)
        if are_metrics:
            return global_metrics
        assert isinstance(logs, Mapping)  # required by Keras
        rows = float(model_state(model).last_rows.numpy())
        # The logs are from a custom step. Logs that equal a metric get its global value; others are
        # averaged.
        means = _weighted_means(
            {"logs": logs, "is_metric": _matching_metrics(logs, metrics)}, totals, rows
        )
        return {
            name: global_metrics[name] if to_numpy(means["is_metric"][name]) == 1 else mean
            for name, mean in means["logs"].items()
        }

    replace_result_reader(model, global_results)


def _metric_values(model: Model) -> dict[str, Any]:
    """Return copies of the metrics' values, since a result may be the metric's own variable."""
    results = model.get_metrics_result()
    return {name: np.array(to_numpy(value)) for name, value in results.items()}


def _matching_metrics(logs: Mapping[str, object], metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return 1 for each log that equals this worker's metric of the same name, else 0."""
    return {
        name: float(name in metrics and np.allclose(metrics[name], to_numpy(log), rtol=1e-5))
        for name, log in logs.items()
    }


def _weighted_means(values: Any, totals: AllReduce, rows: float) -> Any:
    """Average a structure of values, weighted by the rows that each worker has of the batch."""
    tensors = [keras.ops.convert_to_tensor(leaf, "float32") for leaf in keras.tree.flatten(values)]
    return keras.tree.pack_sequence_as(values, totals(tensors, weight=rows))
