"""Make trainer.fit() resume from the run's latest checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawbar.lightning._bases import Callback, Trainer
from drawbar.lightning._checkpoint import CHECKPOINT_NAME, lightning_checkpoint_path
from drawbar.lightning._compat import mark_step_as_saved, stops_before_training
from drawbar.lightning._package import LateBoundBase, bind_base, import_lightning_class
from drawbar.train import Checkpoint
from drawbar.train.backend import start_training

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_CKPT_PATH_INDEX = 4
"""Position of `ckpt_path` among the arguments of `fit`."""


def enable_auto_resume(trainer: Any) -> None:
    """Make the Trainer's `fit` resume from the run's latest checkpoint, if there is one.

    `fit(ckpt_path=...)` takes precedence. Checkpoints that Lightning did not write, and
    checkpoints of another Trainer, are ignored.
    """
    trainer_class = type(trainer)
    if not issubclass(trainer_class, PreparedLightningTrainer):
        # Change the class of the object: loops, callbacks, and the user keep references to the
        # object.
        trainer.__class__ = type(
            trainer_class.__name__,
            (PreparedLightningTrainer, trainer_class),
            {"__module__": trainer_class.__module__},
        )


class PreparedLightningTrainer(Trainer):
    """Trainer whose `fit` resumes from the run's latest checkpoint."""

    _resume_callback: ResumeCallback | None = None

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Train. Resume from the run's latest checkpoint unless `ckpt_path` is passed."""
        if not is_tuner_run(self):  # the Tuner's fit() ends before training
            self._resume_callback = self._resume_callback or _add_resume_callback(self)
            has_ckpt_path = kwargs.get("ckpt_path") or any(
                args[_CKPT_PATH_INDEX : _CKPT_PATH_INDEX + 1]
            )
            if self._resume_callback.path is not None and not has_ckpt_path:
                # The loader is resumable: see _data_position.py.
                warnings.filterwarnings("ignore", "(?s).*your dataloader is not resumable")
                self.ckpt_path = self._resume_callback.path
        super().fit(*args, **kwargs)


def _add_resume_callback(trainer: Any) -> ResumeCallback:
    resume = bind_base(ResumeCallback, trainer.strategy.package)(start_training())
    trainer.callbacks.insert(0, resume)
    return resume


def is_tuner_run(trainer: Any) -> bool:
    """Return whether `fit` is called by Lightning's `Tuner`, which stops before training."""
    return any(map(stops_before_training, trainer.callbacks))


class ResumeCallback(LateBoundBase, Callback, base="callbacks.Callback"):
    """Resume the first `fit` that has batches left to train.

    A training function may call `fit` several times, for example with a higher `max_epochs` each
    time. After a restart, a `fit` that was already complete loads the checkpoint and trains
    nothing. The next `fit` then resumes from the same checkpoint.

    Args:
        checkpoint: Checkpoint to resume from, if any.
    """

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        self.path: str | None = None
        if checkpoint is not None and _is_lightning_checkpoint(checkpoint):
            self.path = str(lightning_checkpoint_path(checkpoint))

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]
    ) -> None:
        """Reset `ckpt_path` after the checkpoint is loaded.

        Otherwise, `test` would load it too, and `ModelCheckpoint` would never delete it.
        """
        if trainer.ckpt_path == self.path:
            trainer.ckpt_path = None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Record in `ModelCheckpoint` that the step of the resume checkpoint is saved.

        `state_dict()` of `ModelCheckpoint` does not contain the last saved step. During gradient
        accumulation, `ModelCheckpoint` would save this step again.
        """
        model_checkpoint = import_lightning_class("callbacks.ModelCheckpoint", self.package)
        for callback in trainer.callbacks:
            if isinstance(callback, model_checkpoint) and self.path in _saved_paths(callback):
                mark_step_as_saved(callback, trainer.global_step)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Forget the checkpoint, so that later `fit` calls do not resume from it."""
        self.path = None


def _saved_paths(callback: Any) -> list[str]:
    return [callback.best_model_path, callback.last_model_path, *callback.best_k_models]


def _is_lightning_checkpoint(checkpoint: Checkpoint) -> bool:
    manifest = checkpoint.manifest
    if manifest is not None:
        return any(Path(file.path).parts[0] == CHECKPOINT_NAME for file in manifest.files)
    # Checkpoints passed as `resume_from_checkpoint` may have no manifest.
    with checkpoint.as_directory() as directory:
        return Path(directory, CHECKPOINT_NAME).exists()
