"""Make ModelCheckpoint save committed checkpoints of the run.

Without a report callback, `ModelCheckpoint` decides when to save. It chooses a path before it
saves, remembers it, and uses it to delete the file. It is therefore configured to generate the
paths of committed checkpoints, such as `<run>/epoch=0-step=10/checkpoint.ckpt`. `best_model_path`,
`best_k_models`, and `fit(ckpt_path="best")` then work as in plain Lightning.
"""

from __future__ import annotations

import re
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from drawbar.lightning._checkpoint import CHECKPOINT_NAME, run_checkpoint_name
from drawbar.lightning._package import Package, import_lightning_class
from drawbar.lightning._report_callback import RayTrainReportCallback
from drawbar.lightning._save_on_request import SaveOnRequest
from drawbar.train import get_context
from drawbar.train.backend import attempt_local, register_best_checkpoint

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import ModelCheckpoint

REPLACED_ATTRIBUTES = ("dirpath", "filename", "CHECKPOINT_NAME_LAST", "FILE_EXTENSION")
"""Attributes of a `ModelCheckpoint` that `save_into_run` sets."""


class _RankingCallbacks(weakref.WeakSet[Any]):
    """Callbacks of this attempt whose best checkpoint is registered."""


def decide_who_saves(trainer: Any, package: Package) -> None:
    """Select what saves into the run: the report callback or, without one, `ModelCheckpoint`.

    With a report callback, the `ModelCheckpoint` that Lightning adds by default is removed. One
    that has settings saves to its own directory, as in plain Lightning. In both cases, a
    checkpoint is also saved on request.

    Raises:
        ValueError: A setting of `ModelCheckpoint` does not work for committed checkpoints.
    """
    reject_weights_only(trainer, package)
    model_checkpoint = import_lightning_class("callbacks.ModelCheckpoint", package)
    callbacks = [
        callback for callback in trainer.callbacks if isinstance(callback, model_checkpoint)
    ]
    has_report_callback = has_saving_report_callback(trainer)
    for callback in callbacks:
        if not has_report_callback:
            save_into_run(callback)
        elif _has_default_settings(callback, model_checkpoint()):
            trainer.callbacks.remove(callback)
    has_request_callback = any(isinstance(each, SaveOnRequest) for each in trainer.callbacks)
    if (has_report_callback or callbacks) and not has_request_callback:
        # Last, so that `ModelCheckpoint` saves before it at the same step.
        trainer.callbacks.append(SaveOnRequest())


def has_saving_report_callback(trainer: Any) -> bool:
    """Return whether a `RayTrainReportCallback` of the Trainer saves checkpoints."""
    return any(
        isinstance(callback, RayTrainReportCallback) and callback.save_checkpoints
        for callback in trainer.callbacks
    )


def reject_weights_only(trainer: Any, package: Package) -> None:
    """Raise if a `ModelCheckpoint` would save checkpoints without training state into the run.

    Raises:
        ValueError: `save_weights_only` is set, and no report callback saves checkpoints.
    """
    model_checkpoint = import_lightning_class("callbacks.ModelCheckpoint", package)
    if has_saving_report_callback(trainer):
        return
    for callback in trainer.callbacks:
        if isinstance(callback, model_checkpoint) and callback.save_weights_only:
            raise ValueError(
                "ModelCheckpoint(save_weights_only=True) would save checkpoints of the run without "
                "optimizer state, from which a restart cannot resume. Remove save_weights_only, or "
                "add drawbar.lightning.RayTrainReportCallback() to the callbacks: it then saves "
                "the checkpoints of the run, and this ModelCheckpoint saves into its dirpath."
            )


def _has_default_settings(callback: ModelCheckpoint, default: ModelCheckpoint) -> bool:
    settings = ("state_key", "dirpath", "filename", "save_top_k", "save_last", "save_weights_only")
    return all(getattr(callback, name) == getattr(default, name) for name in settings)


def save_into_run(callback: ModelCheckpoint) -> None:
    """Make a `ModelCheckpoint` generate the paths of committed checkpoints.

    Its `dirpath` is replaced by the run directory. Its `filename` becomes the name of the
    checkpoint directory; the step is appended if it is missing, so that every name is unique.

    Raises:
        ValueError: `filename` contains "/", or `save_last` is "link".
    """
    if callback.save_last == "link":
        raise ValueError(
            'ModelCheckpoint(save_last="link") is not supported, because a committed checkpoint '
            "has only one name. Remove save_last; the run always keeps its latest checkpoint."
        )
    inserts_names = callback.auto_insert_metric_name
    names: dict[str, Any] = {
        "dirpath": str(get_context().get_storage()),
        "filename": _checkpoint_name_template(callback.filename or "{epoch}-{step}", inserts_names),
        "CHECKPOINT_NAME_LAST": _checkpoint_name_template(
            callback.CHECKPOINT_NAME_LAST, inserts_names
        ),
        "FILE_EXTENSION": f"/{CHECKPOINT_NAME}",
    }
    vars(callback).update(names)
    ranking = attempt_local(_RankingCallbacks)
    if callback.monitor is not None and callback not in ranking:
        ranking.add(callback)
        register_best_checkpoint(lambda: run_checkpoint_name(callback.best_model_path))
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")


def _checkpoint_name_template(filename: str, inserts_names: bool) -> str:
    static_name = filename if inserts_names else re.sub(r"\{.*?\}", "", filename)
    if "/" in static_name:
        raise ValueError(
            f"ModelCheckpoint(filename={filename!r}) would create nested directories. Use for "
            'example filename="epoch={epoch}-loss={val/loss:.2f}", auto_insert_metric_name=False.'
        )
    if "{step" in filename:
        return filename
    return f"{filename}-{{step}}" if inserts_names else f"{filename}-step={{step}}"
