"""Make model.fit resumable and distribute model.predict over the workers."""

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
    """Make a `fit` resume from a loaded checkpoint, also in the middle of an epoch.

    If a callback stopped this run at that checkpoint, `fit` trains no further epochs.

    Keras does not shuffle the batches of `prepare_dataset`, since each rank would use other random
    numbers. When `fit` returns on one rank, all ranks have trained, and rank 0 has written all
    files.
    """
    parameters = inspect.signature(fit).parameters.values()
    _, *names = (
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    )

    def resumable_fit(x: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(x, ResumableBatches) and options.get("validation_split"):
            raise ValueError(
                f"fit(validation_split={options['validation_split']}) does not support "
                "prepare_dataset(). Split the arrays and pass "
                "validation_data=prepare_dataset(x_val, y_val)."
            )
        if (
            isinstance(x, ResumableBatches)
            or hasattr(x, "element_spec")
            or hasattr(x, "batch_sampler")
        ):
            options["shuffle"] = False  # for the last two, Keras would only warn
        options.update(zip(names, args, strict=False))
        callback_list = options.get("callbacks")
        options["callbacks"] = keras.tree.flatten(
            getattr(callback_list, "callbacks", callback_list) or []
        )
        if (set_epoch := getattr(getattr(x, "batch_sampler", None), "set_epoch", None)) is not None:
            _prepend_callback(options, on_epoch_begin=lambda epoch, logs: set_epoch(epoch))
        if _was_stopped_early(model, options):
            _skip_training(model, options)
        if _resumes_after_last_batch(model, options) and isinstance(x, ArrayBatches):
            x.on_epoch_end()
        rest = _remaining_epoch(model, x, options)
        if rest is None and options.get("steps_per_epoch") is None and _should_use_tf_data(x):
            from drawbar.keras._tf_data import as_tf_dataset

            x, epoch_order_callback = as_tf_dataset(x)
            options["callbacks"].insert(0, epoch_order_callback)
        with warnings.catch_warnings(), write_on_rank_zero(options["callbacks"]) as callbacks:
            if options.get("steps_per_epoch") is None:  # an epoch ends with its data
                warnings.filterwarnings("ignore", "Your input ran out of data")
            options["callbacks"] = callbacks
            history = fit(x if rest is None else rest, *args[len(names) :], **options)
        if rest is not None:
            rest.skip_batches(0)  # later reads start at the first batch
        if get_context().get_world_size() > 1:
            collective.barrier()
        return history

    return resumable_fit


def _resumes_after_last_batch(model: Model, options: dict[str, Any]) -> bool:
    """Return whether training resumes from a checkpoint that was saved after an epoch's last batch.

    The checkpoint then contains the dataset's position from before `on_epoch_end`. Returns True
    only once per loaded checkpoint.
    """
    progress = model_state(model).loaded_progress
    should_call, progress.should_call_epoch_end = progress.should_call_epoch_end, False
    return should_call and bool(options.get("initial_epoch", 0) == progress.epochs)


def _was_stopped_early(model: Model, options: dict[str, Any]) -> bool:
    """Return whether a callback stopped this run's training at the loaded checkpoint.

    A different run that starts from this checkpoint continues training.
    """
    progress = model_state(model).loaded_progress
    in_this_run = progress.stopped_run_id == get_context().get_run_id()
    return in_this_run and bool(options.get("initial_epoch", 0) == progress.epochs)


def _skip_training(model: Model, options: dict[str, Any]) -> None:
    model_state(model).loaded_progress = FitProgress()
    options["initial_epoch"] = sys.maxsize  # no epoch is left for any value of `epochs`

    def stop(logs: object) -> None:
        model.stop_training = True  # so that a checkpoint at the end records the stop, too

    options["callbacks"].insert(0, keras.callbacks.LambdaCallback(on_train_begin=stop))


def _should_use_tf_data(data: object) -> bool:
    return isinstance(data, ArrayBatches) and keras.backend.backend() == "tensorflow"


def _remaining_epoch(
    model: Model, data: object, options: dict[str, object]
) -> ResumableBatches | None:
    """Return the data for the rest of the epoch in which the checkpoint was saved.

    None if the checkpoint was not saved in mid-epoch, or if the number of batches per epoch is
    unknown or set by `steps_per_epoch`. The epoch then starts from its first batch.
    """
    progress, first = model_state(model).loaded_progress, options.get("initial_epoch", 0)
    batches = progress.batches if first == progress.epochs else 0
    rest = _as_resumable(data) if batches and options.get("steps_per_epoch") is None else None
    if rest is None:
        progress.batches = 0
        return None

    def begin(epoch: int, logs: object) -> None:
        rest.skip_batches(batches if epoch == first else 0)

    def begin_batch(batch: int, logs: object) -> None:
        # Keras uses the number of batches of a full epoch. A TensorFlow step without a batch would
        # still count itself and draw random numbers, which would change later epochs.
        if batch >= len(rest):
            raise StopIteration  # as Keras does at the end of data
        if model_state(model).loaded_progress is progress:
            restore_torch_rng(progress)  # creating the loader has drawn one more number

    def end_batch(batch: int, logs: object) -> None:
        if model_state(model).loaded_progress is progress:
            model_state(model).loaded_progress = FitProgress()
            restore_metrics(model, progress)  # TensorFlow creates metrics in the first batch

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
    """Wrap data so that its first batches can be skipped; None if its length is unknown."""
    if isinstance(data, ResumableBatches):
        return data if data.num_batches else None
    if hasattr(data, "element_spec"):
        number = int(data.cardinality())
        return SequentialBatches(data, number) if number > 0 else None
    return SequentialBatches(data, len(data)) if hasattr(data, "batch_sampler") else None


def make_distributed_predict(model: Model, predict: KerasMethod) -> KerasMethod:
    """Make `predict` return all rows on every rank if its data is from `prepare_dataset`.

    Each rank computes a part of arrays. For other data, each rank computes its own data.
    """
    if keras.backend.backend() == "jax":
        predict = _on_local_devices(model, predict)

    def predict_all(x: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(x, ArrayBatches):
            return predict(x, *args, **options)
        part, rows = x.rank_slice()
        predictions = predict(part[0] if isinstance(part, tuple) else part, *args, **options)
        return keras.tree.map_structure(lambda array: all_gather_rows(array[:rows]), predictions)

    return predict_all


def _on_local_devices(model: Model, predict: KerasMethod) -> KerasMethod:
    """Return a `predict` that runs on this worker only.

    JAX would treat the data of each worker as a part of one batch and leave the results
    distributed. Therefore, the variables are placed on this worker's devices during the call.
    """

    def predict_alone(*args: object, **options: object) -> object:
        distribution = keras.distribution.distribution()
        shared = [(variable, variable.value) for variable in model.variables]
        keras.distribution.set_distribution(None)
        try:
            for variable, value in shared:
                variable._value = keras.ops.convert_to_tensor(np.asarray(value))
            model.predict_function = None  # it may be compiled for another placement
            return predict(*args, **options)
        finally:
            for variable, value in shared:
                variable._value = value
            model.predict_function = None
            keras.distribution.set_distribution(distribution)

    return predict_alone
