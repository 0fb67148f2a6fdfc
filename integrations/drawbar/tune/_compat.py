"""Private APIs of Ray Tune, read in Ray 2.50 to 2.60. No other file of this package uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from pyarrow.fs import FileSystem
from ray import tune
from ray.tune import result
from ray.tune.experiment import Trial
from ray.tune.logger import LoggerCallback

from drawbar.train.backend import import_private

# Return type of `Trainable.save()`, which `FunctionTrainable` needs for checkpoints in place
if TYPE_CHECKING:
    from ray.tune.trainable.function_trainable import (  # type: ignore[attr-defined]  # not public
        _TrainingResult as TrainingResult,
    )
else:
    TrainingResult = import_private("ray.tune.trainable.function_trainable", "_TrainingResult")

__all__ = ["PROGRESS_FILE", "RESULT_FILE", "TrainingResult"]

# The names are not public. They have not changed in any version of Ray.
PROGRESS_FILE: str = getattr(result, "EXPR_PROGRESS_FILE", "progress.csv")
RESULT_FILE: str = getattr(result, "EXPR_RESULT_FILE", "result.json")

Restore = Callable[[str, Trial], None]

_original_restore: Any = getattr(LoggerCallback, "_restore_from_remote", None)


def replace_result_restore(
    restore: Callable[[str, Trial, Restore], None], trainable: type[tune.Trainable]
) -> None:
    """Replace the method with which Tune's loggers restore result files, in this process.

    Tune has no setting for it, and does not report the end of a sweep. So the replacement stays,
    but applies to trials of one type only. Without the method, Tune's loggers do as usual.

    Args:
        restore: Function of file name, trial, and Tune's own method.
        trainable: Base class of the trials to which it applies.
    """
    if _original_restore is None:
        return

    def restore_file(self: LoggerCallback, file_name: str, trial: Trial) -> None:
        def restore_by_tune(file_name: str, trial: Trial) -> None:
            _original_restore(self, file_name, trial)

        trial_class = cast("Any", trial).get_trainable_cls()
        if isinstance(trial_class, type) and issubclass(trial_class, trainable):
            restore(file_name, trial, restore_by_tune)
        else:
            restore_by_tune(file_name, trial)

    LoggerCallback._restore_from_remote = restore_file  # type: ignore[method-assign]  # see above


def get_last_result(trainable: tune.Trainable) -> dict[str, object]:
    """Return the result of the last step. The public API has no access to it in `save()`."""
    return dict(cast("Any", trainable)._last_result or {})


def get_trial_storage(trainable: tune.Trainable) -> tuple[str, FileSystem]:
    """Return the directory of a trial and its filesystem.

    `Trainable.logdir` is the local directory only.
    """
    storage = cast("Any", trainable)._storage
    return storage.trial_fs_path, storage.storage_filesystem
