"""ReportCheckpointCallback: Keras's epochs and batches to reports and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from drawbar.keras._progress import FitProgress, extra_state, model_state
from drawbar.train import (
    CheckpointUploadMode,
    ValidationTaskConfig,
    checkpoint_dir,
    get_context,
    report,
)
from drawbar.train.backend import get_agreed_checkpoint, report_buffered

MODEL_FILE = "model.keras"
WEIGHTS_FILE = "model.weights.h5"

EVENTS = tuple(
    f"{what}_{when}"
    for what in ("epoch", "train", "train_batch", "test", "test_batch", "predict", "predict_batch")
    for when in ("begin", "end")
)
"""The events of Keras that a callback hears of."""

BETWEEN_EPOCHS = {"train_begin", "epoch_begin", "epoch_end", "train_end"}

_SIGN_FLIPPED_ATTRIBUTE = "min_delta"
"""A setting, whose sign Keras 3 turns round when it first compares: in each process anew."""

Events = str | Sequence[str] | Mapping[str, int]


class ReportCheckpointCallback:
    """Reports metrics, and saves the model, at the events of Keras that are named.

    Every rank reports; rank 0 saves, so that `keras.models.load_model` opens the file `model.keras`
    of the checkpoint. For Keras 3 on every backend, and for Keras 2 (`tf_keras`) under a strategy.
    Outside a run it warns once and does nothing.

    Args:
        checkpoint_on: At which events to save: one, a list of them, or a dict from the event to
            every how many times, such as `{"train_batch_end": 100}`. Names are what follows `on_`
            in Keras, such as "epoch_end", "train_batch_end" or "test_end". An empty list saves
            never.
        report_metrics_on: At which events to report, likewise. With a checkpoint metrics are
            reported anyhow.
        metrics: Which metrics to report: a name, a list of names, or a dict from the name to report
            to Keras's. Default: all.
        stateful_callbacks: Other callbacks of the same `fit`, such as `EarlyStopping`, whose counters, best
            values and best weights go into the checkpoint, and come back when `fit` goes on. List
            this callback after them.
        save_weights: Also save the weights alone, as `model.weights.h5`.
        checkpoint_upload_mode: As for `drawbar.train.report`.
        validation: Have each checkpoint validated, as for `drawbar.train.report`.

    Raises:
        TypeError, ValueError: There is no such event; or, as it is reported, no such metric.
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
        self._callbacks = list(stateful_callbacks)
        self._save_weights = save_weights
        self._options: dict[str, Any] = {
            "checkpoint_upload_mode": checkpoint_upload_mode,
            "validation": validation,
        }
        self._active_events = self._checkpoint_on.keys() | self._report_on.keys()
        if not self._checkpoint_on.keys() <= BETWEEN_EPOCHS:
            self._active_events |= {"train_batch_end"}  # to know how many batches are done
        self._event_counts = dict.fromkeys(EVENTS, 0)
        self._initial_values: list[dict[str, object]] = []
        self._epochs = 0
        self._batches = 0
        self._num_skipped = 0
        self._batches_of_epoch: int | None = None
        self._model: Any = None
        self._has_warned = False

    def set_model(self, model: object) -> None:
        """Learn which model it is; Keras calls it."""
        self._model = model

    def set_params(self, params: Mapping[str, int | None] | None) -> None:
        """Learn how many batches an epoch has, if that is known; Keras calls it."""
        self._batches_of_epoch = (params or {}).get("steps")

    def on_train_begin(self, logs: object = None) -> None:
        """Give other callbacks their state back, which they drop at this event."""
        if self._is_in_run():
            self._restore()
        self._handle_event("train_begin", logs)

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Note the epoch, and how many of its batches were done before."""
        begun = model_state(self._model).loaded_progress
        self._epochs = epoch
        self._num_skipped = self._batches = begun.batches if epoch == begun.epochs else 0
        self._handle_event("epoch_begin", logs)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Note that the epoch is done."""
        self._epochs, self._batches = epoch + 1, 0
        self._handle_event("epoch_end", logs)

    def __getattr__(self, name: str) -> Any:
        """Give what is called at every other event, and Keras 2's questions for batches.

        What does nothing is marked as Keras's own: only then Keras does not wait for each batch.
        """
        event = name.removeprefix("on_")
        if event in EVENTS:
            return partial(self._on_event, event) if event in self._active_events else _noop
        if name in ("on_batch_begin", "on_batch_end"):  # older names of the same events
            return _noop
        if name.startswith("_implements_") and name.endswith("_batch_hooks"):
            what = name.removeprefix("_implements_").removesuffix("_hooks")
            return lambda: bool(self._active_events & {f"{what}_begin", f"{what}_end"})
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _on_event(self, event: str, *batch_and_logs: Any, logs: Any = None) -> None:
        if event == "train_batch_end":
            self._batches = self._num_skipped + batch_and_logs[0] + 1
        self._handle_event(event, (*batch_and_logs, logs))

    def _handle_event(self, event: str, logs: object) -> None:
        saves, reports = self._checkpoint_on.get(event, 0), self._report_on.get(event, 0)
        if not (saves or reports) or not self._is_in_run():
            return
        self._event_counts[event] += 1
        saves = saves and self._event_counts[event] % saves == 0
        reports = reports and self._event_counts[event] % reports == 0
        metrics = self._select_metrics(_find_logs(logs))
        if saves:
            self._save(metrics)
        elif reports and "batch" in event:
            report_buffered(metrics)
        elif reports:
            report(metrics)

    def _is_in_run(self) -> bool:
        try:
            get_context()
        except RuntimeError:
            if not self._has_warned:
                warnings.warn(
                    "ReportCheckpointCallback reports nothing outside a Drawbar trainer's run",
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
                f"ReportCheckpointCallback has metrics {missing}, which are not in the logs; "
                f"there are {', '.join(map(repr, logs))}"
            )
        return {name: logs[found] for name, found in self._metrics.items()}

    def _save(self, metrics: dict[str, object]) -> None:
        leads = get_context().get_world_rank() == 0
        if (sync := getattr(self._model, "jax_state_sync", None)) is not None:
            sync()  # on every rank: placing arrays is a meeting of JAX's processes
        progress = self._progress()
        if not leads and not _is_save_collective(self._model):
            report(metrics)
            return
        with checkpoint_dir() as path:
            self._write(path, progress)
            if leads:
                report(metrics, checkpoint=path, **self._options)
            else:
                report(metrics)

    def _write(self, folder: Path, progress: FitProgress) -> None:
        self._model.save(str(folder / MODEL_FILE))
        if self._save_weights:
            self._model.save_weights(str(folder / WEIGHTS_FILE))
        progress.write(folder)

    def _progress(self) -> FitProgress:
        """Say what is done. After an epoch's last batch that is the epoch."""
        epochs, batches = self._epochs, self._batches
        steps = self._batches_of_epoch or 0
        # Of an execution of several steps Keras tells the last one, which may be none of the epoch.
        is_before_end = 0 < steps <= batches
        if is_before_end:
            epochs, batches = epochs + 1, 0
        progress = FitProgress(epochs, batches, self._event_counts, arrays=extra_state(self._model))
        progress.is_before_end = is_before_end
        if getattr(self._model, "stop_training", False):
            progress.stopped_in = get_context().get_run_id()
        for number, (each, begun) in enumerate(
            zip(self._callbacks, self._initial_values, strict=True)
        ):
            values = scalar_state(each).items()
            # What they were made with is the script's, which may have changed.
            changed = {name: value for name, value in values if begun.get(name) != value}
            progress.callbacks.append(changed)
            for name, arrays in array_state(each).items():
                progress.arrays[f"callbacks/{number}/{name}"] = arrays
        return progress

    def _restore(self) -> None:
        self._initial_values = [scalar_state(each) for each in self._callbacks]
        checkpoint = get_agreed_checkpoint()
        if checkpoint is None:
            return
        with checkpoint.as_directory() as folder:
            saved = FitProgress.read(Path(folder))
        self._event_counts.update(saved.events)
        self._epochs, self._batches = saved.epochs, saved.batches  # until an epoch begins
        for callback, state in zip(self._callbacks, saved.callbacks, strict=False):
            vars(callback).update(state)
        for place, arrays in saved.arrays.items():
            kind, _, rest = place.partition("/")
            number, _, name = rest.partition("/")
            if kind == "callbacks" and int(number) < len(self._callbacks):
                setattr(self._callbacks[int(number)], name, arrays)


def _parse_events(name: str, given: Events) -> dict[str, int]:
    events = [given] if isinstance(given, str) else given
    counted = dict(events) if isinstance(events, Mapping) else dict.fromkeys(events, 1)
    for event, every in counted.items():
        if event not in EVENTS:
            raise ValueError(
                f"{name} has {event!r}, which is no event; there are {', '.join(EVENTS)}"
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"{name}[{event!r}] must be a whole number from 1, found {every!r}")
    return counted


def _parse_metrics(
    metrics: str | Sequence[str] | Mapping[str, str] | None,
) -> dict[str, str] | None:
    if metrics is None:
        return None
    if isinstance(metrics, str):
        return {metrics: metrics}
    return dict(metrics) if isinstance(metrics, Mapping) else {name: name for name in metrics}


def _find_logs(given: object) -> Mapping[str, object]:
    """Find the logs in what an event came with: perhaps a number, perhaps logs."""
    parts = given if isinstance(given, tuple) else (given,)
    return next((part for part in parts if isinstance(part, Mapping)), {})


def _is_save_collective(model: object) -> bool:
    """Whether saving is a meeting of all ranks: of Keras 2's strategies and of JAX's processes."""
    if hasattr(model, "jax_state_sync"):
        return True
    return getattr(getattr(model, "distribute_strategy", None), "num_replicas_in_sync", 1) > 1


def scalar_state(callback: object) -> dict[str, object]:
    """Give the attributes of a callback that are one value each."""
    values: dict[str, object] = {}
    for name, value in vars(callback).items():
        plain = value.item() if getattr(value, "size", 0) == 1 else value
        if name != _SIGN_FLIPPED_ATTRIBUTE and isinstance(plain, bool | int | float | str | None):
            values[name] = plain
    return values


def array_state(callback: object) -> dict[str, list[object]]:
    """Give the attributes of a callback that are lists of arrays, such as the best weights."""
    return {
        name: value
        for name, value in vars(callback).items()
        if isinstance(value, list) and value and all(hasattr(each, "__array__") for each in value)
    }


def _noop(*batch_and_logs: object, logs: object = None) -> None:
    """What Keras calls where nothing is to be done."""


_noop._is_default = True  # type: ignore[attr-defined]  # how Keras marks such methods
