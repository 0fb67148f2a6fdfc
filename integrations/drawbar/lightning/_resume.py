"""Resume trainer.fit() from the run's latest checkpoint."""

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
"""Position of `ckpt_path` among the arguments of `fit`."""


def enable_auto_resume(trainer: Any) -> None:
    """Make the Trainer's `fit` resume from the checkpoint of this attempt, if there is one.

    `fit(ckpt_path=...)` takes precedence. Checkpoints that Lightning did not write, and
    checkpoints of another Trainer, are ignored.
    """
    kind = type(trainer)
    if not issubclass(kind, PreparedLightningTrainer):
        # Change the class, not the object: loops, callbacks, and the user hold references to it.
        members = {"__module__": kind.__module__}
        trainer.__class__ = type(kind.__name__, (PreparedLightningTrainer, kind), members)


class PreparedLightningTrainer(Trainer):
    """Trainer whose `fit` resumes from the run's newest checkpoint."""

    _resume_callback: ResumeCallback | None = None

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Train, from the run's newest checkpoint unless `ckpt_path` is passed."""
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
    return any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)


class ResumeCallback(LateBoundBase, Callback, base="callbacks.Callback"):
    """Resume the first `fit` that has batches left to train.

    A `fit` that was already complete when the run stopped (for example, if the next one raises
    `max_epochs`) loads the checkpoint and leaves the path to the next `fit`.

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
        """Reset `ckpt_path`, which `test` would load and `ModelCheckpoint` would keep."""
        if trainer.ckpt_path == self.path:
            trainer.ckpt_path = None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Mark the resumed step as saved in `ModelCheckpoint`.

        It does not store this, and would save the same step again during gradient accumulation.
        """
        model_checkpoint = import_lightning_class("callbacks.ModelCheckpoint", self.package)
        for callback in trainer.callbacks:
            if isinstance(callback, model_checkpoint) and self.path in _saved_paths(callback):
                callback._last_global_step_saved = trainer.global_step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Forget the checkpoint, since training has started in this process."""
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
