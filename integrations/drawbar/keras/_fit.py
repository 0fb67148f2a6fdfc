"""`fit` and `predict` of a prepared model."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from drawbar.keras._allreduce import all_gather_rows
from drawbar.keras._batches import ArrayBatches, ResumableBatches, SequentialBatches
from drawbar.keras._callback_files import write_on_rank_zero
from drawbar.keras._progress import FitProgress, model_state, restore_metrics, restore_torch_rng
from drawbar.keras._types import Model
from drawbar.train import collective, get_context

KerasMethod = Callable[..., Any]


def make_resumable_fit(model: Model, fit: KerasMethod) -> KerasMethod:
    """Have a `fit` go on where a loaded checkpoint was, also in the middle of an epoch.

    It trains no more if a callback had stopped it there.

    Keras does not shuffle the batches of `prepare_dataset`, by numbers that each rank draws. When
    it is over on one rank, all ranks have trained, and the files are there that rank 0 has written.
    """

    parameters = inspect.signature(fit).parameters.values()
    _, *named = (each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)

    def resumable_fit(x: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(x, ResumableBatches) and options.get("validation_split"):
            raise ValueError(
                f"fit has validation_split={options['validation_split']}, and batches of "
                "prepare_dataset, which it cannot split; split the arrays, and give "
                "validation_data=prepare_dataset(...) of the rest"
            )
        if (
            isinstance(x, ResumableBatches)
            or hasattr(x, "element_spec")
            or hasattr(x, "batch_sampler")
        ):
            options["shuffle"] = False  # of the last two it would only warn
        options.update(zip(named, args, strict=False))
        given = options.get("callbacks")
        options["callbacks"] = keras.tree.flatten(getattr(given, "callbacks", given) or [])
        if (set_epoch := getattr(getattr(x, "batch_sampler", None), "set_epoch", None)) is not None:
            _prepend_callback(options, on_epoch_begin=lambda epoch, logs: set_epoch(epoch))
        if _was_stopped_early(model, options):
            _skip_training(model, options)
        if _resumes_after_last_batch(model, options) and isinstance(x, ArrayBatches):
            x.on_epoch_end()
        rest = _remaining_epoch(model, x, options)
        if rest is None and options.get("steps_per_epoch") is None and _should_use_tf_data(x):
            from drawbar.keras._tf_data import as_tf_dataset

            x, in_order = as_tf_dataset(x)
            options["callbacks"].insert(0, in_order)
        with warnings.catch_warnings(), write_on_rank_zero(options["callbacks"]) as callbacks:
            if options.get("steps_per_epoch") is None:  # an epoch ends as its data does
                warnings.filterwarnings("ignore", "Your input ran out of data")
            options["callbacks"] = callbacks
            history = fit(x if rest is None else rest, *args[len(named) :], **options)
        if rest is not None:
            rest.skip_batches(0)  # whatever it is read for next
        if get_context().get_world_size() > 1:
            collective.barrier()
        return history

    return resumable_fit


def _resumes_after_last_batch(model: Model, options: dict[str, Any]) -> bool:
    """Whether training goes on from an epoch's last batch, after which its order is over."""
    begun = model_state(model).loaded_progress
    is_before_end, begun.is_before_end = begun.is_before_end, False
    return is_before_end and bool(options.get("initial_epoch", 0) == begun.epochs)


def _was_stopped_early(model: Model, options: dict[str, Any]) -> bool:
    """Whether a callback has stopped this run's training where the checkpoint was.

    In another run, which is given that checkpoint, training goes on.
    """
    begun = model_state(model).loaded_progress
    in_this_run = begun.stopped_in == get_context().get_run_id()
    return in_this_run and bool(options.get("initial_epoch", 0) == begun.epochs)


def _skip_training(model: Model, options: dict[str, Any]) -> None:
    model_state(model).loaded_progress = FitProgress()
    options["initial_epoch"] = sys.maxsize  # however many epochs there are, none is left

    def stop(logs: object) -> None:
        model.stop_training = True  # so that a checkpoint of the end says so too

    options["callbacks"].insert(0, keras.callbacks.LambdaCallback(on_train_begin=stop))


def _should_use_tf_data(data: object) -> bool:
    return isinstance(data, ArrayBatches) and keras.backend.backend() == "tensorflow"


def _remaining_epoch(
    model: Model, data: object, options: dict[str, object]
) -> ResumableBatches | None:
    """Give the data that the epoch in whose middle the checkpoint was goes on with.

    None if there is no such epoch; or if nobody knows how many batches it has, or they are not its
    data's: it begins anew.
    """
    begun, first = model_state(model).loaded_progress, options.get("initial_epoch", 0)
    batches = begun.batches if first == begun.epochs else 0
    rest = _as_resumable(data) if batches and options.get("steps_per_epoch") is None else None
    if rest is None:
        begun.batches = 0
        return None

    def begin(epoch: int, logs: object) -> None:
        rest.skip_batches(batches if epoch == first else 0)

    def begin_batch(batch: int, logs: object) -> None:
        # Keras goes by how many an epoch has. A step of TensorFlow's that finds no batch would
        # have counted itself, and drawn its random numbers, so that later epochs were others.
        if batch >= len(rest):
            raise StopIteration  # as Keras does where data runs out
        if model_state(model).loaded_progress is begun:
            restore_torch_rng(begun)  # the loader of the epoch that goes on has drawn one more

    def end_batch(batch: int, logs: object) -> None:
        if model_state(model).loaded_progress is begun:
            model_state(model).loaded_progress = FitProgress()
            restore_metrics(model, begun)  # not before: TensorFlow makes them in the first batch

    _prepend_callback(
        options,
        on_epoch_begin=begin,
        on_train_batch_begin=begin_batch,
        on_train_batch_end=end_batch,
    )
    options["shuffle"] = False
    return rest


def _prepend_callback(options: dict[str, Any], **events: KerasMethod) -> None:
    options["callbacks"].insert(0, keras.callbacks.LambdaCallback(**events))


def _as_resumable(data: Any) -> ResumableBatches | None:
    """Give data so that its first batches can be left out; None if nobody knows how many it has."""
    if isinstance(data, ResumableBatches):
        return data if data.num_batches else None
    if hasattr(data, "element_spec"):
        number = int(data.cardinality())
        return SequentialBatches(data, number) if number > 0 else None
    return SequentialBatches(data, len(data)) if hasattr(data, "batch_sampler") else None


def make_distributed_predict(model: Model, predict: KerasMethod) -> KerasMethod:
    """Have a `predict` of arrays from `prepare_dataset` give all rows on every rank.

    Each computes a part of them. Anything else is computed by each rank for what it is given.
    """
    if keras.backend.backend() == "jax":
        predict = _on_local_devices(model, predict)

    def predict_all(x: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(x, ArrayBatches):
            return predict(x, *args, **options)
        part, rows = x.rank_slice()
        own = predict(part[0] if isinstance(part, tuple) else part, *args, **options)
        return keras.tree.map_structure(lambda each: all_gather_rows(each[:rows]), own)

    return predict_all


def _on_local_devices(model: Model, predict: KerasMethod) -> KerasMethod:
    """`predict` on this worker alone.

    JAX would take what every worker gives for its part of one batch, and leave the results apart.
    So the model has its variables on this worker's own devices meanwhile.
    """

    def predict_alone(*args: object, **options: object) -> object:
        distribution = keras.distribution.distribution()
        shared = [(variable, variable.value) for variable in model.variables]
        keras.distribution.set_distribution(None)
        try:
            for variable, value in shared:
                variable._value = keras.ops.convert_to_tensor(np.asarray(value))
            model.predict_function = None  # one that was made for another placement
            return predict(*args, **options)
        finally:
            for variable, value in shared:
                variable._value = value
            model.predict_function = None
            keras.distribution.set_distribution(distribution)

    return predict_alone
