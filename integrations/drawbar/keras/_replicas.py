"""How replicas stay equal, with PyTorch and TensorFlow, where each worker has one.

After rank 0's weights were copied to all, every step begins and ends with equal ones: the gradients
are averaged before the optimizer gets them, and so is, in the same collective, what layers such as
BatchNormalization have gathered. Metrics are added up when they are read: at the end of an epoch
and of `evaluate`.
"""

from __future__ import annotations

from typing import Any

from drawbar.keras._totals import Totals
from drawbar.train import collective, get_context


def keep_equal(model: Any, totals: Totals) -> None:
    """Give all ranks rank 0's weights, and have every step leave equal ones."""
    model.optimizer.build(model.trainable_variables)
    _copy_rank_zero([*model.variables, *model.optimizer.variables], totals)
    _average_steps(model, totals)
    _add_metrics_up(model, totals)


def _copy_rank_zero(variables: list[Any], totals: Totals) -> None:
    leads = get_context().get_world_rank() == 0
    floats = [each for each in variables if "float" in each.dtype]
    for variable, value in zip(
        floats, totals([each.value * float(leads) for each in floats]), strict=True
    ):
        variable.assign(value)
    others = [each for each in variables if "float" not in each.dtype]  # counters and seeds
    values = collective.broadcast_from_rank_zero([each.numpy() for each in others])
    for variable, value in zip(others, values, strict=True):
        variable.assign(value)


def _average_steps(model: Any, totals: Totals) -> None:
    apply, size = model.optimizer.apply, get_context().get_world_size()

    def apply_averaged(grads: Any, trainable_variables: Any = None) -> None:
        gathered = _gathered_by_layers(model)
        given = [gradient for gradient in grads if gradient is not None]
        means = iter(totals([*given, *(each.value for each in gathered)], divided_by=size))
        averaged = [None if gradient is None else next(means) for gradient in grads]
        apply(averaged, trainable_variables)
        for variable, value in zip(gathered, means, strict=True):
            variable.assign(value)

    model.optimizer.apply = apply_averaged


def _gathered_by_layers(model: Any) -> list[Any]:
    """Give what layers change by themselves, without the weights of those that are frozen."""
    return [
        variable
        for layer in model._flatten_layers()
        if layer.trainable
        for variable in layer._non_trainable_variables
        if "float" in variable.dtype
    ]


def _add_metrics_up(model: Any, totals: Totals) -> None:
    result = model._get_metrics_result_or_logs

    def result_of_all(logs: Any) -> Any:
        variables = model.metrics_variables
        own = [variable.numpy() for variable in variables]
        for variable, value in zip(
            variables, totals([each.value for each in variables]), strict=True
        ):
            variable.assign(value)
        try:
            return result(logs)
        finally:
            for variable, value in zip(variables, own, strict=True):
                variable.assign(value)

    model._get_metrics_result_or_logs = result_of_all
