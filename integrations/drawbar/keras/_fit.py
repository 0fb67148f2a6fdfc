"""`fit` and `predict` of a prepared model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras

from drawbar.keras._batches import Batches, ReadBatches, SharedBatches
from drawbar.keras._progress import Progress, add_metrics, training_of
from drawbar.keras._totals import gather_rows

Method = Callable[..., Any]


def fit_on(model: Any, fit: Method) -> Method:
    """Have a `fit` go on where a loaded checkpoint was, also in the middle of an epoch.

    Keras does not shuffle the batches of `prepare_dataset`, by numbers that each rank draws.
    """

    def fit_from_there(x: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(x, Batches) or hasattr(x, "element_spec") or hasattr(x, "batch_sampler"):
            options["shuffle"] = False  # of the last two it would only warn
        if (set_epoch := getattr(getattr(x, "batch_sampler", None), "set_epoch", None)) is not None:
            options["callbacks"] = _with(options, lambda epoch, logs: set_epoch(epoch))
        if options.get("steps_per_epoch") is not None:
            training_of(model).begun.batches = 0
            return fit(x, *args, **options)
        rest = _rest(model, x, options)
        with warnings.catch_warnings():
            # An epoch without a number of steps ends as its data does.
            warnings.filterwarnings("ignore", "Your input ran out of data")
            return fit(x if rest is None else rest, *args, **options)

    return fit_from_there


def _rest(model: Any, data: Any, options: dict[str, Any]) -> Batches | None:
    """Give the data that the epoch in whose middle the checkpoint was goes on with.

    None if there is no such epoch, or if nobody knows how many batches it has: it begins anew.
    """
    begun, first = training_of(model).begun, options.get("initial_epoch", 0)
    batches = begun.batches if first == begun.epochs else 0
    rest = _readable(data) if batches else None
    if rest is None:
        begun.batches = 0
        return None

    def begin(epoch: int, logs: Any) -> None:
        rest.leave_out(batches if epoch == first else 0)

    def end(batch: int, logs: Any) -> None:
        if training_of(model).begun is begun:
            training_of(model).begun = Progress()
            add_metrics(model, begun)  # not before: TensorFlow makes them in the first batch

    options.update(callbacks=_with(options, begin, end), shuffle=False)
    return rest


def _with(options: dict[str, Any], on_epoch_begin: Method, on_batch_end: Any = None) -> list[Any]:
    own = keras.callbacks.LambdaCallback(
        on_epoch_begin=on_epoch_begin, on_train_batch_end=on_batch_end
    )
    return [own, *keras.tree.flatten(options.get("callbacks") or [])]


def _readable(data: Any) -> Batches | None:
    """Give data so that its first batches can be left out; None if nobody knows how many it has."""
    if isinstance(data, Batches):
        return data
    if hasattr(data, "element_spec"):
        number = int(data.cardinality())
        return ReadBatches(data, number) if number > 0 else None
    return ReadBatches(data, len(data)) if hasattr(data, "batch_sampler") else None


def predict_for_all(model: Any, predict: Method) -> Method:
    """Have a `predict` of arrays from `prepare_dataset` give all rows on every rank.

    Each computes a part of them. Anything else is computed by each rank for what it is given.
    """
    if keras.backend.backend() == "jax":
        predict = _alone(model)

    def predict_all(x: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(x, SharedBatches):
            return predict(x, *args, **options)
        part = x.part()
        own = predict(part[0] if isinstance(part, tuple) else part, *args, **options)
        return keras.tree.map_structure(gather_rows, own)

    return predict_all


def _alone(model: Any) -> Method:
    """`predict` on this worker alone.

    JAX would take what every worker gives for its part of one batch, and leave the results apart.
    """

    def predict(*args: Any, **options: Any) -> Any:
        distribution = keras.distribution.distribution()
        keras.distribution.set_distribution(None)
        try:
            local = keras.models.clone_model(model)
            local.set_weights(model.get_weights())
            return local.predict(*args, **options)
        finally:
            keras.distribution.set_distribution(distribution)

    return predict
