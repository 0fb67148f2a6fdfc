"""How replicas stay equal, with PyTorch and TensorFlow, where each worker has one.

After rank 0's weights were copied to all, every step begins and ends with equal ones: the gradients
are averaged before an optimizer gets them, by how many rows each rank had of the batch, and so is,
in the same collective, what layers such as BatchNormalization have gathered. Metrics are added up
when they are read: at the end of an epoch and of `evaluate`. A rank that has no row of a batch goes
along with a row of zeros, of which nothing is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import keras
import numpy as np

from drawbar.keras._allreduce import AllReduce, to_numpy
from drawbar.keras._progress import model_state
from drawbar.keras._types import Model, Optimizer, Tensor, Variable
from drawbar.train import collective, get_context

Step = Callable[[Any], object]

_patched_optimizers: WeakSet[Optimizer] = WeakSet()
"""The optimizers that are given averages."""


def broadcast_weights(model: Model, totals: AllReduce) -> None:
    """Give all ranks rank 0's weights, and its state of the optimizers."""
    states = [variable for each in _find_optimizers(model) for variable in each.variables]
    variables, leads = [*model.variables, *states], get_context().get_world_rank() == 0
    floats = [each for each in variables if "float" in each.dtype]
    # Not times 0: what is infinite on another rank would be no number on all of them.
    own = [each.value if leads else keras.ops.zeros_like(each.value) for each in floats]
    for variable, value in zip(floats, totals(own), strict=True):
        variable.assign(value)
    others = [each for each in variables if "float" not in each.dtype]  # counters and seeds
    values = collective.broadcast_from_rank_zero([each.numpy() for each in others])
    for variable, value in zip(others, values, strict=True):
        variable.assign(value)


def synchronize_replicas(model: Model, totals: AllReduce) -> None:
    """Have every step leave equal weights, also those with an optimizer of a later `compile`."""
    compile = model.compile

    def compile_and_average(*args: object, **options: object) -> None:
        compile(*args, **options)
        require_mean_losses(model)
        _patch_optimizers(model, totals)

    model.compile = compile_and_average
    _track_batch_rows(model)
    _patch_optimizers(model, totals)
    _patch_metrics(model, totals)


def require_mean_losses(model: Model) -> None:
    """Refuse a loss that is a sum over rows: what workers have of it is averaged.

    Raises:
        ValueError: The model was compiled with such a loss.
    """
    for each in keras.tree.flatten(model.loss):
        if getattr(each, "reduction", None) == "sum":
            raise ValueError(
                f"the loss {getattr(each, 'name', each)!r} has reduction='sum'; with this backend "
                "of Keras's the workers' gradients are averaged, which would divide it by their "
                "number. Set reduction='sum_over_batch_size', and a learning rate that is larger "
                "by the batch size"
            )


def _find_optimizers(model: object) -> list[Optimizer]:
    """Give those that a model trains with: its own, and others that a subclass has beside it."""
    found: dict[int, Optimizer] = {}
    for held in vars(model).values():
        parts = held.values() if isinstance(held, Mapping) else held
        for each in parts if isinstance(held, Mapping | list | tuple) else [held]:
            if isinstance(each, keras.optimizers.Optimizer):
                found[id(each)] = each
    return list(found.values())


def _track_batch_rows(model: Model) -> None:
    """Have steps know how many rows this worker has of the batch; it may have none."""
    training = model_state(model)
    training.last_rows = keras.Variable(1.0, trainable=False, name="last_rows")
    read = model._get_metrics_result_or_logs

    def with_row_count(run: Step) -> Step:
        def step(data: object) -> object:
            parts = (each for each in keras.tree.flatten(data) if each is not None)
            training.rows = rows = keras.ops.shape(next(parts))[0]
            has_some = isinstance(rows, int) and rows > 0  # in TensorFlow's graphs nobody knows
            try:
                logs = run(data) if has_some else read(_run_on_empty_batch(model, run, data, rows))
            finally:
                training.rows = None
            training.last_rows.assign(keras.ops.cast(rows, "float32"))
            return logs

        return step

    model.train_step, model.test_step = (
        with_row_count(model.train_step),
        with_row_count(model.test_step),
    )
    model.test_function = None  # one that was made before


def _run_on_empty_batch(model: Model, run: Step, data: object, rows: Any) -> object:
    """Run a step on a row of zeros if this worker has none; its metrics then stay as they were."""

    def or_zeros(part: Any) -> Any:
        def zeros() -> object:
            return keras.ops.zeros((1, *keras.ops.shape(part)[1:]), part.dtype)

        return None if part is None else keras.ops.cond(rows == 0, zeros, lambda: part)

    before = [(each, keras.ops.copy(each.value)) for each in model.metrics_variables]
    logs = run(keras.tree.map_structure(or_zeros, data))
    for variable, value in before:
        variable.assign(keras.ops.where(rows == 0, value, variable.value))
    return logs


def _patch_optimizers(model: Model, totals: AllReduce) -> None:
    if keras.backend.backend() == "tensorflow":
        model.jit_compile = False  # XLA knows no collectives of TensorFlow's
    model.train_function = None  # one that was made before averages nothing
    for optimizer in _find_optimizers(model):
        if optimizer not in _patched_optimizers:
            _patched_optimizers.add(optimizer)
            optimizer.apply = _with_averaged_gradients(optimizer.apply, model, totals)


def _with_averaged_gradients(
    apply: Callable[..., object], model: Model, totals: AllReduce
) -> Callable[..., None]:
    def apply_averaged(grads: Sequence[Tensor | None], trainable_variables: object = None) -> None:
        gathered = _layer_statistics(model)
        given = [gradient for gradient in grads if gradient is not None]
        rows = model_state(model).rows
        means = iter(
            totals([*given, *(each.value for each in gathered)], weight=1 if rows is None else rows)
        )
        averaged = [None if gradient is None else next(means) for gradient in grads]
        apply(averaged, trainable_variables)
        for variable, value in zip(gathered, means, strict=True):
            variable.assign(value)

    return apply_averaged


def _layer_statistics(model: Model) -> list[Variable]:
    """Give what layers change by themselves, without the weights of those that are frozen."""
    return [
        variable
        for layer in model._flatten_layers()
        if layer.trainable
        for variable in layer._non_trainable_variables
        if "float" in variable.dtype
    ]


def _patch_metrics(model: Model, totals: AllReduce) -> None:
    result = model._get_metrics_result_or_logs

    def global_results(logs: object) -> object:
        are_metrics = result(logs) is not logs
        metrics, variables = _metric_values(model), model.metrics_variables
        own = [variable.numpy() for variable in variables]
        for variable, value in zip(
            variables, totals([each.value for each in variables]), strict=True
        ):
            variable.assign(value)
        try:
            metrics_of_all = _metric_values(model)
        finally:
            for variable, value in zip(variables, own, strict=True):
                variable.assign(value)
        if are_metrics:
            return metrics_of_all
        assert isinstance(logs, Mapping)  # Keras takes nothing else
        rows = float(model_state(model).last_rows.numpy())
        # A step of the user's own gave these: some may be metrics, what else they are is averaged.
        means = _weighted_means(
            {"logs": logs, "is": _matching_metrics(logs, metrics)}, totals, rows
        )
        return {
            name: metrics_of_all[name] if to_numpy(means["is"][name]) == 1 else mean
            for name, mean in means["logs"].items()
        }

    model._get_metrics_result_or_logs = global_results


def _metric_values(model: Model) -> dict[str, Any]:
    """Give what the metrics say now: a result may be the very variable that the metric adds to."""
    found = model.get_metrics_result()
    return {name: np.array(to_numpy(each)) for name, each in found.items()}


def _matching_metrics(logs: Mapping[str, object], metrics: Mapping[str, Any]) -> dict[str, float]:
    """Say by 1 which logs are what this worker's metrics of their names say."""
    return {
        name: float(name in metrics and np.allclose(metrics[name], to_numpy(log), rtol=1e-5))
        for name, log in logs.items()
    }


def _weighted_means(values: Any, totals: AllReduce, rows: float) -> Any:
    """Average a structure of values by the workers' rows of the batch."""
    own = [keras.ops.convert_to_tensor(each, "float32") for each in keras.tree.flatten(values)]
    return keras.tree.pack_sequence_as(values, totals(own, weight=rows))
