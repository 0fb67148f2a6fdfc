"""ReportCheckpointCallback: report Keras metrics and checkpoints."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from drawbar.keras._compat import mark_default
from drawbar.keras._progress import FitProgress, ModelState, extra_state, model_state
from drawbar.train import (
    CheckpointUploadMode,
    ValidationTaskConfig,
    checkpoint_dir,
    get_context,
    report,
    set_progress,
    should_checkpoint,
)
from drawbar.train.backend import get_agreed_checkpoint, get_resume_checkpoint, report_buffered

MODEL_FILE = "model.keras"
WEIGHTS_FILE = "model.weights.h5"

EVENTS = tuple(
    f"{what}_{when}"
    for what in ("epoch", "train", "train_batch", "test", "test_batch", "predict", "predict_batch")
    for when in ("begin", "end")
)
"""Keras events for which a callback has methods."""

BETWEEN_EPOCHS = {"train_begin", "epoch_begin", "epoch_end", "train_end"}

_SIGN_FLIPPED_ATTRIBUTE = "min_delta"
"""Setting whose sign Keras 3 flips at the first comparison, once per process."""

Events = str | Sequence[str] | Mapping[str, int]


class ReportCheckpointCallback:
    """Report metrics and save the model at selected Keras events.

    Every rank reports, and rank 0 saves. `keras.models.load_model` opens the file `model.keras` of
    the checkpoint. The callback works with Keras 3 on every backend, and with Keras 2 (`tf_keras`)
    under a strategy. Outside a run, it warns once and does nothing.

    Args:
        checkpoint_on: Events at which to save: one event, a list of events, or a dict from event to
            interval, such as `{"train_batch_end": 100}`. Event names are Keras's method names
            without `on_`, such as "epoch_end", "train_batch_end", or "test_end". An empty list
            disables saving. Otherwise, a checkpoint is also saved before the next batch if the run
            is to stop or to move.
        report_metrics_on: Events at which to report, in the same format. Saving a checkpoint
            always reports metrics.
        metrics: Metrics to report: a name, a list of names, or a dict from reported name to Keras's
            name. Default: all.
        stateful_callbacks: Other callbacks of the same `fit` whose counters, best values, and best
            weights are stored in checkpoints and restored when `fit` resumes. List this callback
            after them in `fit(callbacks=[...])`. `fit` of a model from `prepare_model` adds
            `EarlyStopping`, `ReduceLROnPlateau`, and `ModelCheckpoint`.
        save_weights: Whether to also save the weights alone, as `model.weights.h5`.
        checkpoint_upload_mode: See `drawbar.train.report()`.
        validation: Whether to validate each checkpoint. See `drawbar.train.report()`.

    Raises:
        TypeError, ValueError: An event does not exist, or an interval is not a positive integer. A
            metric that is not in the logs raises ValueError at its first report.

    Example:
        ```python
        counter = MyCallback()
        report = ReportCheckpointCallback(
            checkpoint_on={"train_batch_end": 100}, stateful_callbacks=[counter]
        )
        model.fit(data, callbacks=[counter, report])
        ```
    """

    CHECKPOINT_NAME = MODEL_FILE

    def __init__(
        self,
        checkpoint_on: Events = "epoch_end",
        report_metrics_on: Events = "epoch_end",
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
        *,
        stateful_callbacks: Sequence[object] = (),
        save_weights: bool = False,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
        validation: bool | ValidationTaskConfig = False,
    ) -> None:
        self._checkpoint_on = _parse_events("checkpoint_on", checkpoint_on)
        self._report_on = _parse_events("report_metrics_on", report_metrics_on)
        self._metrics = _parse_metrics(metrics)
        self._stateful_callbacks = list(stateful_callbacks)
        self._monitors: list[object] = []
        self._should_restore_monitors = False
        self._save_weights = save_weights
        self._options: dict[str, Any] = {
            "checkpoint_upload_mode": checkpoint_upload_mode,
            "validation": validation,
        }
        self._active_events = self._checkpoint_on.keys() | self._report_on.keys()
        if not self._checkpoint_on.keys() <= BETWEEN_EPOCHS:
            self._active_events |= {"train_batch_end"}  # to count completed batches
        if self._checkpoint_on:
            self._active_events |= {"train_batch_begin"}  # to save on request
        self._event_counts = dict.fromkeys(EVENTS, 0)
        self._initial_values: list[dict[str, object]] | None = None  # unless `fit` has begun
        self._params: Mapping[str, int | None] = {}
        self._num_skipped = 0
        self._batches_of_epoch: int | None = None
        self._total_epochs: int | None = None
        self._model: Any = None
        self._has_warned = False
        self._unloaded_epochs = 0  # of the resume checkpoint, if the model has not loaded it

    def set_model(self, model: object) -> None:
        """Set the model. Called by Keras."""
        self._model = model

    def set_monitors(self, monitors: Sequence[object], *, should_restore: bool) -> None:
        """Add callbacks that monitor a metric to the stateful callbacks of the next `fit`.

        Called by `fit` of a model from `prepare_model`.

        Args:
            monitors: The callbacks. Those in `stateful_callbacks` are ignored.
            should_restore: Whether to restore their state from the checkpoint.
        """
        self._monitors = [
            monitor
            for monitor in monitors
            if all(monitor is not callback for callback in self._stateful_callbacks)
        ]
        self._should_restore_monitors = should_restore

    def find_reported_name(self, metric: str) -> str | None:
        """Return the name with which a metric of Keras is reported; None if it is not."""
        if self._metrics is None:
            return metric
        return next((name for name, source in self._metrics.items() if source == metric), None)

    def set_params(self, params: Mapping[str, int | None] | None) -> None:
        """Set the number of epochs, and of batches if it is known. Called by Keras."""
        self._params = params or {}

    def on_train_begin(self, logs: object = None) -> None:
        """Restore the state of other callbacks, which they reset at this event."""
        # Not in `set_params`, which `evaluate` calls with the batches of the test data.
        self._batches_of_epoch = self._params.get("steps")
        self._total_epochs = self._params.get("epochs")
        if self._is_in_run():
            self._restore()
        self._handle_event("train_begin", logs)

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Record the epoch and how many of its batches were completed before."""
        state = model_state(self._model)
        progress = state.loaded_progress
        if epoch == 0 and self._unloaded_epochs and get_context().get_world_rank() == 0:
            warnings.warn(
                f"fit() starts at epoch 0, but the checkpoint has {self._unloaded_epochs} epochs "
                "of this run. To resume, load it, for example with "
                "fit(initial_epoch=load_state(model)).",
                stacklevel=2,
            )
        self._unloaded_epochs = 0
        self._num_skipped = progress.batches if epoch == progress.epochs else 0
        state.epochs, state.batches = epoch, self._num_skipped
        self._handle_event("epoch_begin", logs)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Record that the epoch is complete."""
        if self._is_in_run():
            state = model_state(self._model)
            state.epochs, state.batches = epoch + 1, 0
            set_progress(state.epochs, self._total_epochs or None, unit="epochs")
        # An epoch may have only one batch, before which nothing is saved.
        is_requested = bool(self._checkpoint_on) and self._is_in_run() and should_checkpoint()
        self._handle_event("epoch_end", logs, is_requested=is_requested)

    def __getattr__(self, name: str) -> Any:
        """Return the methods for all other events and Keras 2's `_implements_*_batch_hooks`.

        Unused events get a method that is marked as Keras's default. Otherwise, Keras would wait
        for each batch.
        """
        event = name.removeprefix("on_")
        if event in EVENTS:
            return partial(self._on_event, event) if event in self._active_events else _noop
        if name in ("on_batch_begin", "on_batch_end"):  # old names of the train_batch events
            return _noop
        if name.startswith("_implements_") and name.endswith("_batch_hooks"):
            kind = name.removeprefix("_implements_").removesuffix("_hooks")
            return lambda: bool(self._active_events & {f"{kind}_begin", f"{kind}_end"})
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _on_event(self, event: str, *batch_and_logs: Any, logs: Any = None) -> None:
        if event == "train_batch_begin" and self._checkpoint_on:
            self._save_if_requested(batch_and_logs[0])
        if event == "train_batch_end":
            model_state(self._model).batches = self._num_skipped + batch_and_logs[0] + 1
        self._handle_event(event, (*batch_and_logs, logs))

    def _handle_event(self, event: str, logs: object, *, is_requested: bool = False) -> None:
        saves, reports = self._checkpoint_on.get(event, 0), self._report_on.get(event, 0)
        if not (saves or reports or is_requested) or not self._is_in_run():
            return
        self._event_counts[event] += 1
        saves = is_requested or (saves and self._event_counts[event] % saves == 0)
        reports = reports and self._event_counts[event] % reports == 0
        metrics = self._select_metrics(_find_logs(logs))
        if saves:
            self._save(metrics)
        elif reports and "batch" in event:
            report_buffered(metrics)
        elif reports:
            report(metrics)

    def _save_if_requested(self, batch: int) -> None:
        # Not at the end of a batch: Keras 3 would wait for the result of each one.
        if self._is_in_run() and should_checkpoint() and batch:
            model_state(self._model).batches = self._num_skipped + batch
            self._save({})

    def _is_in_run(self) -> bool:
        try:
            get_context()
        except RuntimeError:
            if not self._has_warned:
                warnings.warn(
                    "ReportCheckpointCallback has no effect outside a Drawbar run. Call fit() in "
                    "the training function of a trainer.",
                    stacklevel=2,
                )
            self._has_warned = True
            return False
        return True

    def _select_metrics(self, logs: Mapping[str, object]) -> dict[str, object]:
        if self._metrics is None or not logs:
            return dict(logs)
        missing = [name for name in self._metrics.values() if name not in logs]
        if missing:
            raise ValueError(
                f"ReportCheckpointCallback(metrics=) has {missing}, which are not in the logs. "
                f"The logs have {', '.join(map(repr, logs))}."
            )
        return {name: logs[keras_name] for name, keras_name in self._metrics.items()}

    def _save(self, metrics: dict[str, object]) -> None:
        is_rank_zero = get_context().get_world_rank() == 0
        if (sync := getattr(self._model, "jax_state_sync", None)) is not None:
            sync()  # on every rank: placing arrays is a collective in JAX
        progress = self._progress()
        if not is_rank_zero and not _is_save_collective(self._model):
            report(metrics)
            return
        with checkpoint_dir() as path:
            self._write(path, progress)
            if is_rank_zero:
                report(metrics, checkpoint=path, **self._options)
            else:
                report(metrics)

    def _write(self, directory: Path, progress: FitProgress) -> None:
        self._model.save(str(directory / MODEL_FILE))
        if self._save_weights:
            self._model.save_weights(str(directory / WEIGHTS_FILE))
        progress.write(directory)

    def _progress(self) -> FitProgress:
        """Return the current progress. After an epoch's last batch, the epoch is complete."""
        state = model_state(self._model)
        if self._initial_values is None:
            return self._progress_outside_fit(state)
        epochs, batches = state.epochs, state.batches
        steps = self._batches_of_epoch or 0
        # If Keras executes several steps at once, it reports the last one, which may be > steps.
        is_epoch_complete = 0 < steps <= batches
        if is_epoch_complete:
            epochs, batches = epochs + 1, 0
        progress = FitProgress(epochs, batches, self._event_counts, arrays=extra_state(self._model))
        progress.should_call_epoch_end = is_epoch_complete
        if getattr(self._model, "stop_training", False):
            progress.stopped_run_id = get_context().get_run_id()
        callbacks = [*self._stateful_callbacks, *self._monitors]
        for number, (callback, initial) in enumerate(
            zip(callbacks, self._initial_values, strict=True)
        ):
            values = scalar_state(callback).items()
            # Initial values are the script's arguments, which may have changed on resume.
            changed = {name: value for name, value in values if initial.get(name) != value}
            progress.callbacks.append(changed)
            for name, arrays in array_state(callback).items():
                progress.arrays[f"callbacks/{number}/{name}"] = arrays
        return progress

    def _progress_outside_fit(self, state: ModelState) -> FitProgress:
        """Return the progress of a model that is evaluated, and not trained with this callback."""
        progress = state.loaded_progress
        if (progress.epochs, progress.batches) != (state.epochs, state.batches):
            progress = FitProgress(state.epochs, state.batches)  # trained since it was loaded
        events = {name: progress.events.get(name, 0) + n for name, n in self._event_counts.items()}
        arrays = progress.arrays or extra_state(self._model)
        return dataclasses.replace(progress, events=events, arrays=arrays)

    def _restore(self) -> None:
        callbacks = [*self._stateful_callbacks, *self._monitors]
        self._initial_values = [scalar_state(callback) for callback in callbacks]
        checkpoint = get_agreed_checkpoint()
        if checkpoint is None:
            return
        with checkpoint.as_directory() as directory:
            saved = FitProgress.read(Path(directory))
        state = model_state(self._model)
        if not state.epochs:
            state.epochs, state.batches = saved.epochs, saved.batches  # until an epoch begins
        if not state.loaded_progress.epochs and get_resume_checkpoint() is not None:
            self._unloaded_epochs = saved.epochs
        self._event_counts.update(saved.events)
        if not self._should_restore_monitors:
            callbacks = self._stateful_callbacks
        for callback, values in zip(callbacks, saved.callbacks, strict=False):
            vars(callback).update(values)
        for key, arrays in saved.arrays.items():
            kind, _, rest = key.partition("/")
            number, _, name = rest.partition("/")
            if kind == "callbacks" and int(number) < len(callbacks):
                setattr(callbacks[int(number)], name, arrays)


def _parse_events(name: str, value: Events) -> dict[str, int]:
    events = [value] if isinstance(value, str) else value
    intervals = dict(events) if isinstance(events, Mapping) else dict.fromkeys(events, 1)
    for event, every in intervals.items():
        if event not in EVENTS:
            raise ValueError(
                f"{name} has unknown event {event!r}. Known events: {', '.join(EVENTS)}."
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"{name}[{event!r}] must be a positive integer, found {every!r}.")
    return intervals


def _parse_metrics(
    metrics: str | Sequence[str] | Mapping[str, str] | None,
) -> dict[str, str] | None:
    if metrics is None:
        return None
    if isinstance(metrics, str):
        return {metrics: metrics}
    return dict(metrics) if isinstance(metrics, Mapping) else {name: name for name in metrics}


def _find_logs(event_argument: object) -> Mapping[str, object]:
    """Find the logs in the argument or arguments of a Keras event."""
    parts = event_argument if isinstance(event_argument, tuple) else (event_argument,)
    return next((part for part in parts if isinstance(part, Mapping)), {})


def _is_save_collective(model: object) -> bool:
    """Return whether saving is a collective: with Keras 2's strategies and with JAX."""
    if hasattr(model, "jax_state_sync"):
        return True
    return getattr(getattr(model, "distribute_strategy", None), "num_replicas_in_sync", 1) > 1


def scalar_state(callback: object) -> dict[str, object]:
    """Return the scalar attributes of a callback."""
    values: dict[str, object] = {}
    for name, value in vars(callback).items():
        scalar = value.item() if getattr(value, "size", 0) == 1 else value
        if name != _SIGN_FLIPPED_ATTRIBUTE and isinstance(scalar, bool | int | float | str | None):
            values[name] = scalar
    return values


def array_state(callback: object) -> dict[str, list[object]]:
    """Return the attributes of a callback that are lists of arrays, such as the best weights."""
    return {
        name: value
        for name, value in vars(callback).items()
        if isinstance(value, list) and value and all(hasattr(item, "__array__") for item in value)
    }


def _noop(*batch_and_logs: object, logs: object = None) -> None:
    """Do nothing. Keras calls it for unused events."""


mark_default(_noop)
