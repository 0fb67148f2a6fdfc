"""Make model.fit resumable and distribute model.predict over the workers."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from drawbar.keras._allreduce import all_gather_rows
from drawbar.keras._batches import (
    ArrayBatches,
    RayDataBatches,
    ResumableBatches,
    SequentialBatches,
)
from drawbar.keras._callback_files import write_on_rank_zero
from drawbar.keras._compat import set_placed_value
from drawbar.keras._monitors import KeepLearningRate, connect_monitors
from drawbar.keras._progress import FitProgress, model_state, restore_metrics, restore_torch_rng
from drawbar.keras._types import Model
from drawbar.train import collective, get_context

KerasMethod = Callable[..., Any]


def make_resumable_fit(model: Model, fit: KerasMethod) -> KerasMethod:
    """Return a `fit` that resumes from the checkpoint that `load_state` has loaded.

    If the checkpoint was saved within an epoch, `fit` continues with the next batch. If a callback
    such as `EarlyStopping` had already ended the training of this run, `fit` trains no further
    epochs.

    The returned `fit` turns off Keras's shuffling for data from `prepare_dataset`, because each
    rank would use another order. When it returns on one rank, all ranks have trained, and rank 0
    has written the files of all callbacks.
    """
    parameters = inspect.signature(fit).parameters.values()
    _, *positional_names = (  # the first one is `x`
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    )

    def resumable_fit(x: Any = None, *args: Any, **options: Any) -> Any:
        # From here on, positional arguments are in `options` too.
        options.update(zip(positional_names, args, strict=False))
        _normalize_options(x, options)
        if (set_epoch := getattr(getattr(x, "batch_sampler", None), "set_epoch", None)) is not None:
            _prepend_callback(options, on_epoch_begin=lambda epoch, logs: set_epoch(epoch))
        _connect_callbacks(model, options)
        if _was_stopped_early(model, options):
            _skip_training(model, options)
        if _should_call_epoch_end(model, options) and isinstance(x, ArrayBatches):
            x.on_epoch_end()
        rest = _remaining_epoch(model, x, options)
        if rest is None and options.get("steps_per_epoch") is None and _should_use_tf_data(x):
            from drawbar.keras._tf_data import as_tf_dataset

            x, epoch_order_callback = as_tf_dataset(x)
            options["callbacks"].insert(0, epoch_order_callback)
        with (
            warnings.catch_warnings(),
            _tracking_trained_batches(model, x, options["callbacks"]),
            write_on_rank_zero(options["callbacks"]) as callbacks,
        ):
            if options.get("steps_per_epoch") is None:
                # The end of the data is then the end of an epoch, which needs no warning.
                warnings.filterwarnings("ignore", "Your input ran out of data")
            options["callbacks"] = callbacks
            unnamed = args[len(positional_names) :]  # `fit` has `*args`, or rejects them
            history = fit(x if rest is None else rest, *unnamed, **options)
        if rest is not None:
            rest.skip_batches(0)  # a later `fit` with this data starts at its first batch
        if get_context().get_world_size() > 1:
            collective.barrier()
        return history

    return resumable_fit


def _normalize_options(x: object, options: dict[str, Any]) -> None:
    """Check the options of `fit`, turn off shuffling if `x` has an order, and list the callbacks.

    Raises:
        ValueError: `x` is from `prepare_dataset`, and `validation_split` is set.
    """
    if isinstance(x, ResumableBatches) and options.get("validation_split"):
        raise ValueError(
            f"fit(validation_split={options['validation_split']}) does not support "
            "prepare_dataset(). Split the arrays and pass "
            "validation_data=prepare_dataset(x_val, y_val)."
        )
    if (
        isinstance(x, ResumableBatches)
        or hasattr(x, "element_spec")  # a tf.data.Dataset
        or hasattr(x, "batch_sampler")  # a DataLoader
    ):
        # Keras cannot shuffle a Dataset or DataLoader. Without this, it would print a warning.
        options["shuffle"] = False
    callback_list = options.get("callbacks")
    # Keras accepts a `CallbackList`, a list, one callback, or None.
    options["callbacks"] = keras.tree.flatten(
        getattr(callback_list, "callbacks", callback_list) or []
    )


def _connect_callbacks(model: Model, options: dict[str, Any]) -> None:
    """Prepare callbacks whose state or file must outlive a restart."""
    progress = model_state(model).loaded_progress
    has_progress = bool(progress.epochs or progress.batches)
    is_resumed = has_progress and options.get("initial_epoch", 0) == progress.epochs
    options["callbacks"] = connect_monitors(options["callbacks"], is_resumed=is_resumed)
    if not is_resumed:
        return
    for index, callback in enumerate(options["callbacks"], start=1):
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True  # otherwise, it would delete the rows of earlier epochs
        if isinstance(callback, keras.callbacks.LearningRateScheduler) and progress.batches:
            options["callbacks"].insert(index, KeepLearningRate())


def _should_call_epoch_end(model: Model, options: dict[str, Any]) -> bool:
    """Return whether `on_epoch_end` of the dataset must be called before training resumes.

    This is the case if the checkpoint was saved after an epoch's last batch, but before Keras
    called `on_epoch_end`: the dataset is then still at the position of that epoch.
    """
    progress = model_state(model).loaded_progress
    # Reset the flag, so that a second `fit` does not call it again.
    should_call, progress.should_call_epoch_end = progress.should_call_epoch_end, False
    return should_call and bool(options.get("initial_epoch", 0) == progress.epochs)


def _was_stopped_early(model: Model, options: dict[str, Any]) -> bool:
    """Return whether a callback had ended this run's training when the checkpoint was saved.

    A different run that starts from this checkpoint continues training.
    """
    progress = model_state(model).loaded_progress
    in_this_run = progress.stopped_run_id == get_context().get_run_id()
    return in_this_run and bool(options.get("initial_epoch", 0) == progress.epochs)


def _skip_training(model: Model, options: dict[str, Any]) -> None:
    """Change the options of `fit` so that it trains no epoch."""
    model_state(model).loaded_progress = FitProgress()
    options["initial_epoch"] = sys.maxsize  # no epoch is left for any value of `epochs`

    def stop(logs: object) -> None:
        # So that a checkpoint that this `fit` saves also records that training was stopped.
        model.stop_training = True

    options["callbacks"].insert(0, keras.callbacks.LambdaCallback(on_train_begin=stop))


def _should_use_tf_data(data: object) -> bool:
    return isinstance(data, ArrayBatches) and keras.backend.backend() == "tensorflow"


def _remaining_epoch(
    model: Model, data: object, options: dict[str, object]
) -> ResumableBatches | None:
    """Return the data for the rest of the epoch in which the checkpoint was saved.

    Returns None if the epoch starts from its first batch: if the checkpoint was not saved within an
    epoch, or if the number of batches per epoch is unknown or set by `steps_per_epoch`.
    """
    progress, first_epoch = model_state(model).loaded_progress, options.get("initial_epoch", 0)
    batches = progress.batches if first_epoch == progress.epochs else 0
    rest = _as_resumable(data) if batches and options.get("steps_per_epoch") is None else None
    if rest is None:
        progress.batches = 0
        return None

    def is_before_first_batch() -> bool:
        return model_state(model).loaded_progress is progress

    def begin(epoch: int, logs: object) -> None:
        rest.skip_batches(batches if epoch == first_epoch else 0)

    def begin_batch(batch: int, logs: object) -> None:
        # Keras would run as many steps as a complete epoch has. With TensorFlow, a step that finds
        # no data still increases the step counter and draws random numbers, so later epochs would
        # have other results than in an uninterrupted run.
        if batch >= len(rest):
            raise StopIteration  # as Keras does at the end of data
        if is_before_first_batch():
            # The PyTorch DataLoader through which Keras reads has drawn a number at its start.
            restore_torch_rng(progress)

    def end_batch(batch: int, logs: object) -> None:
        if is_before_first_batch():
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


def _prepend_callback(options: dict[str, Any], **methods: KerasMethod) -> None:
    options["callbacks"].insert(0, keras.callbacks.LambdaCallback(**methods))


def _tracking_trained_batches(
    model: Model, data: object, callbacks: list[Any]
) -> AbstractContextManager[None]:
    """Let a shard save the position after the trained batches: Keras reads others ahead."""
    if not isinstance(data, RayDataBatches):
        return nullcontext()
    # Not at the end of a batch: Keras would wait for the result of each one. The other callbacks
    # of a batch's beginning are called between these two.
    first = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: data.set_num_trained(0),
        on_train_batch_begin=lambda batch, logs: data.set_num_trained(batch),
    )
    last = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: data.set_num_trained(
            batch + model.steps_per_execution
        )
    )
    callbacks[:] = [first, *callbacks, last]
    return data.training()


def _as_resumable(data: Any) -> ResumableBatches | None:
    """Wrap data so that its first batches can be skipped; None if its length is unknown."""
    if isinstance(data, ResumableBatches):
        return data if data.num_batches else None
    if hasattr(data, "element_spec"):
        number = int(data.cardinality())
        return SequentialBatches(data, number) if number > 0 else None
    return SequentialBatches(data, len(data)) if hasattr(data, "batch_sampler") else None


def make_distributed_predict(model: Model, predict: KerasMethod) -> KerasMethod:
    """Return a `predict` that divides arrays from `prepare_dataset` between the ranks.

    Every rank receives the predictions of all rows. For any other data, each rank predicts all rows
    of the data that it passes.
    """
    if keras.backend.backend() == "jax":
        predict = _on_local_devices(model, predict)

    def predict_all(x: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(x, ArrayBatches):
            return predict(x, *args, **options)
        part, rows = x.rank_slice()
        inputs = part[0] if isinstance(part, tuple) else part  # without targets and weights
        predictions = predict(inputs, *args, **options)
        # A rank without rows has predicted one row, which `[:rows]` removes.
        return keras.tree.map_structure(lambda array: all_gather_rows(array[:rows]), predictions)

    return predict_all


def _on_local_devices(model: Model, predict: KerasMethod) -> KerasMethod:
    """Return a `predict` that runs on this worker only.

    JAX would treat the data of each worker as a part of one batch and leave the results
    distributed. Therefore, the variables are placed on this worker's devices during the call.
    """

    def predict_alone(*args: object, **options: object) -> object:
        distribution = keras.distribution.distribution()
        distributed_values = [(variable, variable.value) for variable in model.variables]
        keras.distribution.set_distribution(None)
        try:
            for variable, value in distributed_values:
                set_placed_value(variable, keras.ops.convert_to_tensor(np.asarray(value)))
            model.predict_function = None  # it may be compiled for another placement
            return predict(*args, **options)
        finally:
            for variable, value in distributed_values:
                set_placed_value(variable, value)
            model.predict_function = None
            keras.distribution.set_distribution(distribution)

    return predict_alone
