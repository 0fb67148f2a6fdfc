"""Resume callbacks of Keras that have a state, and record the best checkpoint of monitors.

Keras begins `EarlyStopping`, `ReduceLROnPlateau`, and `ModelCheckpoint` from scratch in each
process. After a restart, they would compare with no earlier epoch: training would run longer, with
another learning rate, and a worse model would replace the best one. `SwapEMAWeights` would continue
from averaged weights, and `LearningRateScheduler` would change the rate of an epoch twice.
"""

from __future__ import annotations

from typing import Any

import keras

from drawbar.keras._report_callback import ReportCheckpointCallback
from drawbar.train.backend import attempt_local, register_best_checkpoint

_MONITORS = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
)


def connect_monitors(callbacks: list[Any], *, is_resumed: bool) -> list[Any]:
    """Let the report callbacks of a `fit` save and restore the state of its monitors.

    Args:
        callbacks: Callbacks of the `fit`.
        is_resumed: Whether the `fit` resumes from the loaded checkpoint.

    Returns:
        The callbacks, with report callbacks after the monitors whose state they save.
    """
    monitors = [callback for callback in callbacks if isinstance(callback, _MONITORS)]
    swaps = [each for each in callbacks if isinstance(each, keras.callbacks.SwapEMAWeights)]
    if not monitors and not swaps:
        return callbacks
    reports = [callback for callback in callbacks if isinstance(callback, ReportCheckpointCallback)]
    for report in reports:
        report.set_monitors([*monitors, *swaps], should_restore=is_resumed)
        attempt_local(_BestCheckpoints).set_monitors(report, monitors)
    ends = [index for index, callback in enumerate(callbacks, start=1) if callback in monitors]
    end = max(ends, default=0)
    early = [callback for callback in callbacks[:end] if callback in reports]
    others = [callback for callback in callbacks[:end] if callback not in reports]
    return [*others, *early, *callbacks[end:]]


class KeepLearningRate(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Keep the learning rate of the checkpoint in an epoch that resumes in its middle.

    `LearningRateScheduler` has already changed it in this epoch. A schedule that multiplies the
    rate would change it twice. List this callback after the scheduler.
    """

    def on_train_begin(self, logs: object = None) -> None:
        """Record the learning rate of the checkpoint."""
        self._rate = keras.ops.convert_to_numpy(self.model.optimizer.learning_rate).item()

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Set the learning rate in the first epoch."""
        if self._rate is not None:
            self.model.optimizer.learning_rate = self._rate
        self._rate = None


class _BestCheckpoints:
    """Metrics of the best checkpoints of the latest `fit` of this attempt."""

    def __init__(self) -> None:
        self._report: Any = None
        self._monitors: list[Any] = []
        self._num_registered = 0

    def set_monitors(self, report: ReportCheckpointCallback, monitors: list[Any]) -> None:
        """Register the best checkpoint of each monitor that selects a model."""
        self._report = report
        self._monitors = [monitor for monitor in monitors if _selects_model(monitor)]
        for index in range(self._num_registered, len(self._monitors)):
            register_best_checkpoint(lambda index=index: self._find_best(index))  # type: ignore[misc]
            self._num_registered += 1

    def _find_best(self, index: int) -> dict[str, object] | None:
        if index >= len(self._monitors):
            return None
        monitor = self._monitors[index]
        name = self._report.find_reported_name(monitor.monitor)
        if name is None or monitor.best is None:
            return None
        return {name: float(monitor.best)}


def _selects_model(monitor: Any) -> bool:
    if isinstance(monitor, keras.callbacks.ModelCheckpoint):
        return bool(monitor.save_best_only)
    return isinstance(monitor, keras.callbacks.EarlyStopping)
