"""An attempt goes on from the run's newest checkpoint, without a line of the user's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawbar.lightning._checkpoint import CHECKPOINT_NAME, lightning_checkpoint_path
from drawbar.lightning._package import LateBoundBase, bind_base, import_lightning_class
from drawbar.train import Checkpoint
from drawbar.train.backend import start_training

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = Trainer = object

_CKPT_PATH_INDEX = 4
"""The place of `ckpt_path` among the arguments of `fit`."""


def enable_auto_resume(trainer: Any) -> None:
    """Have the Trainer's `fit` go on from the checkpoint that this attempt starts from, if any.

    `fit(ckpt_path=...)` wins. A checkpoint that Lightning did not write is left alone, and so is
    one of another Trainer's training.
    """
    kind = type(trainer)
    if not issubclass(kind, PreparedLightningTrainer):
        # The class and not the object: loops, callbacks and the user hold on to that.
        members = {"__module__": kind.__module__}
        trainer.__class__ = type(kind.__name__, (PreparedLightningTrainer, kind), members)


class PreparedLightningTrainer(Trainer):
    """What a prepared Trainer does other than before."""

    _resume_callback: ResumeCallback | None = None

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Train, from the run's newest checkpoint if no other is given."""
        if not is_tuner_run(self):  # else the training is yet to come
            self._resume_callback = self._resume_callback or _add_resume_callback(self)
            has_ckpt_path = kwargs.get("ckpt_path") or any(
                args[_CKPT_PATH_INDEX : _CKPT_PATH_INDEX + 1]
            )
            if self._resume_callback.path is not None and not has_ckpt_path:
                # It is resumable: see _data_position.py.
                warnings.filterwarnings("ignore", "(?s).*your dataloader is not resumable")
                self.ckpt_path = self._resume_callback.path
        super().fit(*args, **kwargs)


def _add_resume_callback(trainer: Any) -> ResumeCallback:
    resume = bind_base(ResumeCallback, trainer.strategy.package)(start_training())
    trainer.callbacks.insert(0, resume)
    return resume


def is_tuner_run(trainer: Any) -> bool:
    """Whether a Trainer's `fit` is one of Lightning's `Tuner`, which ends before it trains."""
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)


class ResumeCallback(LateBoundBase, Callback, base="callbacks.Callback"):
    """Where a Trainer goes on: in the first `fit` that has anything left to train.

    One that was complete when the run stopped, say before `max_epochs` was raised for a second one,
    loads the checkpoint and leaves it to the next.

    Args:
        checkpoint: From what its training goes on, if from anything.
    """

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        self.path: str | None = None
        if checkpoint is not None and _is_lightning_checkpoint(checkpoint):
            self.path = str(lightning_checkpoint_path(checkpoint))

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]
    ) -> None:
        """Have the Trainer forget the path: `test` would load it, `ModelCheckpoint` keep it."""
        if trainer.ckpt_path == self.path:
            trainer.ckpt_path = None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Have a `ModelCheckpoint` know that it has saved the step it goes on from.

        It forgets that, and while gradients are accumulated it would save the same step again.
        """
        model_checkpoint = import_lightning_class("callbacks.ModelCheckpoint", self.package)
        for each in trainer.callbacks:
            if isinstance(each, model_checkpoint) and self.path in _saved_paths(each):
                each._last_global_step_saved = trainer.global_step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """From here on the training is in this process."""
        self.path = None


def _saved_paths(callback: Any) -> list[str]:
    return [callback.best_model_path, callback.last_model_path, *callback.best_k_models]


def _is_lightning_checkpoint(checkpoint: Checkpoint) -> bool:
    manifest = checkpoint.manifest
    if manifest is not None:
        return any(Path(file.path).parts[0] == CHECKPOINT_NAME for file in manifest.files)
    with checkpoint.as_directory() as folder:  # the user's own, by `resume_from_checkpoint`
        return Path(folder, CHECKPOINT_NAME).exists()
