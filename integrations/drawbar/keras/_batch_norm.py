"""Synchronize `BatchNormalization` over the replicas of PyTorch and TensorFlow.

JAX does not need this, because it computes a layer over the rows of all workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from drawbar.keras._allreduce import AllReduce
from drawbar.keras._compat import flatten_layers, get_batch_moments, replace_batch_moments
from drawbar.keras._progress import model_state
from drawbar.keras._types import Layer, Model
from drawbar.train.backend import add_final_notice

Moments = Callable[[Any, Any], tuple[Any, Any]]


def synchronize_batch_norm(model: Model, totals: AllReduce, *, all_layers: bool) -> None:
    """Normalize by the rows of all workers in a model's `BatchNormalization` layers.

    Adds a notice to the run if trainable layers remain unsynchronized.

    Args:
        model: A built model.
        totals: Sums over the ranks.
        all_layers: Whether to synchronize every layer, or only those with `synchronized=True`.
    """
    layers: list[Any] = [
        layer
        for layer in flatten_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    local = [layer for layer in layers if not (all_layers or layer.synchronized)]
    for layer in layers:
        if layer not in local:
            replace_batch_moments(layer, _synchronized_moments(layer, model, totals))
    names = [repr(layer.name) for layer in local if layer.trainable]
    if names:
        add_final_notice(
            "BatchNormalization normalizes by the rows of one worker, not of the whole batch, in "
            f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}. "
            "Losses therefore differ from a run with one process. To normalize by all rows, set "
            "prepare_model(model, sync_batch_norm=True)."
        )


def _synchronized_moments(layer: Layer, model: Model, totals: AllReduce) -> Moments:
    """Return a function for mean and variance that sums over all ranks during a step."""
    compute_local, axes = get_batch_moments(layer)

    def compute(inputs: Any, mask: Any) -> tuple[Any, Any]:
        rows = model_state(model).rows
        if rows is None:  # not in a step of `fit`, so the other ranks may not take part
            return compute_local(inputs, mask)
        ops = keras.ops
        values, count = _masked(inputs, mask, axes)
        sums = [count, ops.sum(values, axes), ops.sum(ops.square(values), axes)]
        rows = ops.cast(rows, inputs.dtype)
        # A rank without rows computes on a row of zeros, which must not count. Its values can be
        # NaN, for example the mean of a row in which every timestep is masked.
        local_sums = ops.where(rows > 0, ops.stack(sums), 0)
        total = _sum_over_ranks(local_sums, rows, totals)
        mean = total[1] / ops.maximum(total[0], 1)
        variance = total[2] / ops.maximum(total[0], 1) - ops.square(mean)
        return mean, ops.maximum(variance, 0)

    return compute


def _masked(inputs: Any, mask: Any, axes: Sequence[int]) -> tuple[Any, Any]:
    """Return the inputs with masked entries set to 0, and the unmasked entries per channel."""
    ops = keras.ops
    if mask is None:
        shape = ops.shape(inputs)
        count = ops.cast(math.prod(shape[axis] for axis in axes), inputs.dtype)
        (channels,) = (size for axis, size in enumerate(shape) if axis not in axes)
        return inputs, count * ops.ones(channels, inputs.dtype)
    unmasked = ops.broadcast_to(ops.expand_dims(ops.cast(mask, "bool"), -1), ops.shape(inputs))
    return ops.where(unmasked, inputs, 0), ops.sum(ops.cast(unmasked, inputs.dtype), axes)


def _sum_over_ranks(values: Any, rows: Any, totals: AllReduce) -> Any:
    """Sum a tensor over all ranks, with the gradient of the loss over all rows.

    The loss of a rank is a mean over its rows, and gradients are later averaged by rows. Gradients
    with respect to the sum are therefore weighted by rows and divided by the rows of this rank.
    """

    @keras.ops.custom_gradient  # type: ignore[untyped-decorator]  # Keras has no types
    def sum_over_ranks(values: Any) -> tuple[Any, Callable[..., Any]]:
        def compute_gradient(*args: Any, upstream: Any = None) -> Any:
            gradient = args[-1] if upstream is None else upstream
            # A rank without rows contributes nothing, even where its gradient is NaN.
            (total,) = totals([keras.ops.where(rows > 0, gradient * rows, 0)])
            return total / keras.ops.maximum(rows, 1)

        return totals([values])[0], compute_gradient

    return sum_over_ranks(values)
