"""Without a report callback, a `ModelCheckpoint` decides when to save; where and how is Drawbar's.

`ModelCheckpoint` chooses a path before it saves, remembers it, and deletes by it. It is told such
names that this is the path of the committed checkpoint, `<run>/epoch=0-step=10/checkpoint.ckpt`. So
`best_model_path`, `best_k_models` and `fit(ckpt_path="best")` are as in plain Lightning.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

from drawbar.lightning._checkpoint import CHECKPOINT_NAME
from drawbar.lightning._package import Package, import_lightning_class
from drawbar.lightning._report_callback import RayTrainReportCallback
from drawbar.train import get_context

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import ModelCheckpoint

REPLACED_ATTRIBUTES = ("dirpath", "filename", "CHECKPOINT_NAME_LAST", "FILE_EXTENSION")
"""Attributes of a `ModelCheckpoint` that `save_into_run` sets."""


def decide_who_saves(trainer: Any, package: Package) -> None:
    """Have one callback save into the run: the report callback, or else each `ModelCheckpoint`.

    Beside a report callback the `ModelCheckpoint` that Lightning adds by itself is left out, and
    one that was asked for anything saves where it says, as in plain Lightning.

    Raises:
        ValueError: A `ModelCheckpoint` asks for what cannot be committed.
    """
    model_checkpoint = import_lightning_class("callbacks.ModelCheckpoint", package)
    callbacks = [each for each in trainer.callbacks if isinstance(each, model_checkpoint)]
    reports = any(
        isinstance(each, RayTrainReportCallback) and each.save_checkpoints
        for each in trainer.callbacks
    )
    for callback in callbacks:
        if not reports:
            save_into_run(callback)
        elif _has_default_settings(callback, model_checkpoint()):
            trainer.callbacks.remove(callback)


def _has_default_settings(callback: ModelCheckpoint, default: ModelCheckpoint) -> bool:
    settings = ("state_key", "dirpath", "filename", "save_top_k", "save_last", "save_weights_only")
    return all(getattr(callback, each) == getattr(default, each) for each in settings)


def save_into_run(callback: ModelCheckpoint) -> None:
    """Give a `ModelCheckpoint` the names of committed checkpoints.

    Its `dirpath` becomes the run's directory, whatever it was. Its `filename` names the directory
    of the checkpoint, and gets the step if that is not in it: each checkpoint has its own name.

    Raises:
        ValueError: Its `filename` has a "/", or it has `save_last="link"`.
    """
    if callback.save_last == "link":
        raise ValueError(
            'ModelCheckpoint has save_last="link", but a committed checkpoint has no second name; '
            "leave it out: the run always keeps its newest checkpoint"
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
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")


def _checkpoint_name_template(filename: str, inserts_names: bool) -> str:
    written = filename if inserts_names else re.sub(r"\{.*?\}", "", filename)
    if "/" in written:
        raise ValueError(
            f"ModelCheckpoint has filename={filename!r}, which would make folders in folders; "
            'write for example filename="epoch={epoch}-loss={val/loss:.2f}", '
            "auto_insert_metric_name=False"
        )
    if "{step" in filename:
        return filename
    return f"{filename}-{{step}}" if inserts_names else f"{filename}-step={{step}}"
