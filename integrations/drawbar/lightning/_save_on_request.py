"""Save a checkpoint when the run is to stop or to move, not only at the next periodic save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drawbar import train
from drawbar.lightning._bases import Callback
from drawbar.lightning._checkpoint import (
    CHECKPOINT_NAME,
    logged_metrics,
    report_shared_checkpoint,
    shared_checkpoint_dir,
)
from drawbar.lightning._package import LateBoundBase

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class SaveOnRequest(LateBoundBase, Callback, base="callbacks.Callback"):
    """Save a checkpoint into the run after the optimizer step at which one is requested.

    `prepare_trainer` adds it to a Trainer that saves checkpoints into the run. After the last batch
    of an epoch, it waits for the validation, so that a resumed run need not repeat it.
    """

    def __init__(self) -> None:
        self.latest_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the step from which training starts."""
        self.latest_step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Save if a checkpoint is requested and this batch has ended an optimizer step."""
        should_save = train.should_checkpoint()  # in each batch: all ranks call it equally often
        previous, self.latest_step = self.latest_step, trainer.global_step
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if should_save and self.latest_step != previous and not is_last:
            _save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if a checkpoint is requested."""
        if train.should_checkpoint():
            _save(trainer)


def _save(trainer: Trainer) -> None:
    with shared_checkpoint_dir() as path:
        trainer.save_checkpoint(path / CHECKPOINT_NAME, weights_only=False)
        report_shared_checkpoint(logged_metrics(trainer), path)
