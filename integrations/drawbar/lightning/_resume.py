"""Make trainer.fit() resume from the run's latest checkpoint."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch

from drawbar.lightning._bases import Callback
from drawbar.lightning._checkpoint import is_lightning_checkpoint, lightning_checkpoint_path
from drawbar.lightning._compat import (
    begin_next_epoch,
    end_restart,
    get_reload_epochs,
    mark_step_as_saved,
    set_train_reload_epoch,
    set_val_reload_epoch,
    stops_before_training,
)
from drawbar.lightning._freezing import read_freezing, set_freezing
from drawbar.lightning._model_checkpoint import has_saving_report_callback
from drawbar.lightning._package import LateBoundBase, bind_base, import_lightning_class
from drawbar.lightning._pruning import read_masks, set_masks
from drawbar.train import Checkpoint, get_checkpoint, get_context
from drawbar.train.backend import register_data_position, start_training

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_SOURCES = "lightning.ckpt_path"
"""Name under which checkpoints store the `ckpt_path` arguments of their training."""

_STATE = "drawbar"
"""Key of `ResumeState` in checkpoints of Lightning."""


class ResumeState(TypedDict):
    """State of a training that Lightning does not save."""

    reload_epochs: tuple[float, float]
    """Epochs in which the training and validation loaders were created."""

    freezing: dict[str, bool]
    """Values of `read_freezing` that have changed since the start of `fit`."""

    masks: dict[str, torch.Tensor]
    """Masks of pruned parameters."""


def select_resume_checkpoint(trainer: Any, ckpt_path: Any) -> Any:
    """Return the checkpoint from which this call of `fit` starts.

    This is the run's latest checkpoint, if Lightning wrote it in this training. `ckpt_path` takes
    precedence until the run has a checkpoint of a training that started from it.

    Args:
        trainer: Trainer of this worker, whose `fit` was called.
        ckpt_path: Argument of `fit`.

    Returns:
        The path of the run's latest checkpoint, or `ckpt_path`.
    """
    resume = next((each for each in trainer.callbacks if isinstance(each, ResumeCallback)), None)
    if resume is None:
        resume = bind_base(ResumeCallback, trainer.strategy.package)(start_training())
        trainer.callbacks.insert(0, resume)
        register_data_position(_SOURCES, lambda: resume.sources)
    path = resume.add_source(ckpt_path)
    if path is None:
        _warn_if_nothing_is_saved(trainer)
        return ckpt_path
    _remove_learning_rate_finders(trainer)
    # The loader is resumable: see _data_position.py.
    warnings.filterwarnings("ignore", "(?s).*your dataloader is not resumable")
    return path


def _warn_if_nothing_is_saved(trainer: Any) -> None:
    if (
        trainer.is_global_zero
        and get_context().get_attempt() > 0
        and get_checkpoint() is None
        and not trainer.checkpoint_callbacks
        and not has_saving_report_callback(trainer)
    ):
        warnings.warn(
            "fit() starts from scratch after a failure, because the Trainer saves no checkpoints. "
            "Remove enable_checkpointing=False, or add drawbar.lightning.RayTrainReportCallback() "
            "to its callbacks.",
            stacklevel=2,
        )


def _remove_learning_rate_finders(trainer: Any) -> None:
    """Remove callbacks that would search a learning rate again before training resumes.

    The checkpoint has the learning rate that they found. After a search, Lightning would train from
    epoch 0 again.
    """
    finder = import_lightning_class("callbacks.LearningRateFinder", trainer.strategy.package)
    trainer.callbacks = [
        each
        for each in trainer.callbacks
        if not isinstance(each, finder) or type(each).on_fit_start is not finder.on_fit_start
    ]


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
        self.sources: list[str] = []
        self._metrics: dict[str, float] = {}
        self._state: ResumeState | None = None
        self._val_reload_epoch: float | None = None
        self._freezing: dict[str, bool] = {}
        if checkpoint is not None and is_lightning_checkpoint(checkpoint):
            self.path = str(lightning_checkpoint_path(checkpoint))
            if checkpoint.manifest is not None:
                self.sources = [*cast("Any", checkpoint.manifest.data_positions.get(_SOURCES, ()))]
                self._metrics = {
                    name: float(value)
                    for name, value in checkpoint.manifest.metrics.items()
                    if isinstance(value, int | float) and name not in ("epoch", "step")
                }

    def add_source(self, ckpt_path: object) -> str | None:
        """Record the argument of a `fit`, and return the checkpoint that replaces it, if any."""
        source = "" if ckpt_path is None else str(ckpt_path)
        is_start = source not in ("", "last", *self.sources)
        if source not in self.sources:
            self.sources.append(source)
        return None if is_start else self.path

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]
    ) -> None:
        """Reset `ckpt_path` after the checkpoint is loaded.

        Otherwise, `test` would load it too, and `ModelCheckpoint` would never delete it.
        """
        if trainer.ckpt_path == self.path:
            trainer.ckpt_path = None
            self._state = cast("ResumeState | None", checkpoint.get(_STATE))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add what Lightning does not save."""
        changed = read_freezing(pl_module).items() - self._freezing.items()
        checkpoint[_STATE] = ResumeState(
            reload_epochs=get_reload_epochs(trainer),
            freezing=dict(changed),
            masks=read_masks(pl_module),
        )

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Count the epoch, and record in `ModelCheckpoint` that the resumed step is saved.

        `state_dict()` of `ModelCheckpoint` does not contain the last saved step. During gradient
        accumulation, `ModelCheckpoint` would save this step again.
        """
        begin_next_epoch(trainer)
        model_checkpoint = import_lightning_class("callbacks.ModelCheckpoint", self.package)
        for callback in trainer.callbacks:
            if isinstance(callback, model_checkpoint) and self.path in _saved_paths(callback):
                mark_step_as_saved(callback, trainer.global_step)
        self._freezing = read_freezing(pl_module)
        if self._state is not None:
            self._restore_reload_epochs(trainer, *self._state["reload_epochs"])
            set_freezing(pl_module, self._state["freezing"])
            set_masks(pl_module, self._state.get("masks", {}))
        self._state = None

    def _restore_reload_epochs(self, trainer: Any, train: float, val: float) -> None:
        """Let Lightning create loaders again in the epochs of a run without restart."""
        epochs = trainer.reload_dataloaders_every_n_epochs
        if not epochs:
            return
        if trainer.is_global_zero and train < get_reload_epochs(trainer)[0]:
            warnings.warn(
                f"train_dataloader() was called in epoch {train:.0f} and, after the restart, again "
                f"in epoch {trainer.current_epoch}. If it depends on self.current_epoch, use "
                f"self.current_epoch // {epochs} * {epochs} instead, which is the same in both.",
                stacklevel=2,
            )
        set_train_reload_epoch(trainer, train)
        if val >= 0:  # validation has created its loaders
            self._val_reload_epoch = val

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the epoch of the validation loaders after Lightning has created them."""
        if self._val_reload_epoch is not None:
            set_val_reload_epoch(trainer, self._val_reload_epoch)
        self._val_reload_epoch = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Restore the logged metrics, which schedulers and callbacks monitor.

        Then forget the checkpoint, so that later `fit` calls do not resume from it.
        """
        if self.path is not None:
            for name, value in self._metrics.items():
                trainer.callback_metrics.setdefault(name, torch.tensor(value))
            end_restart(trainer)
        self.path = None


def _saved_paths(callback: Any) -> list[str]:
    return [callback.best_model_path, callback.last_model_path, *callback.best_k_models]
