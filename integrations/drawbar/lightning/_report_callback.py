"""RayTrainReportCallback: report logged metrics and checkpoints."""

from __future__ import annotations

import math
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
from drawbar.train import CheckpointUploadMode, ValidationTaskConfig

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class RayTrainReportCallback(LateBoundBase, Callback, base="callbacks.Callback"):
    """Report logged metrics and checkpoints every n steps or epochs.

    Each rank reports the Trainer's `callback_metrics` with `epoch` and `step`. A checkpoint has
    Lightning's checkpoint as `checkpoint.ckpt`: a file or, with the DTensor and DeepSpeed
    strategies and with FSDP's `state_dict_type="sharded"`, a directory of shards that all ranks
    write.

    Args:
        checkpoint_upload_mode: SYNC (default) waits until a checkpoint is committed; ASYNC
            continues training in the meantime.
        validation: Whether to validate each checkpoint with the `validation_config` of the
            `TorchTrainer`. A `ValidationTaskConfig` also sets the arguments and the timeout of the
            validation. See `drawbar.train.report()`.
        every_n_train_steps: Report after every n optimizer steps. Default: no reports by steps.
        every_n_epochs: Report after every n-th training epoch and its validation. None disables
            reports by epochs. If a report by steps is also due at the last step of the epoch, only
            one report is made.
        save_checkpoints: Whether reports have a checkpoint. If False, the Trainer's
            `ModelCheckpoint`, if any, decides when to save.

    Raises:
        ValueError: An argument is out of range, or `validation` is set without checkpoints.

    Example:
        ```python
        trainer = L.Trainer(
            strategy=drawbar.lightning.RayDDPStrategy(),
            callbacks=[drawbar.lightning.RayTrainReportCallback(every_n_epochs=2)],
        )
        trainer = drawbar.lightning.prepare_trainer(trainer)
        ```
    """

    CHECKPOINT_NAME = CHECKPOINT_NAME

    def __init__(
        self,
        checkpoint_upload_mode: CheckpointUploadMode | None = None,
        validation: bool | ValidationTaskConfig = False,
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = 1,
        save_checkpoints: bool = True,
    ) -> None:
        checkpoint_upload_mode = checkpoint_upload_mode or CheckpointUploadMode.SYNC
        for name, value in (
            ("every_n_train_steps", every_n_train_steps),
            ("every_n_epochs", every_n_epochs),
        ):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer or None, found {value!r}.")
        if every_n_train_steps is None and every_n_epochs is None:
            raise ValueError("every_n_train_steps and every_n_epochs are both None. Set one.")
        if checkpoint_upload_mode not in (CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC):
            raise ValueError(
                "checkpoint_upload_mode must be CheckpointUploadMode.SYNC or ASYNC, because this "
                f"callback writes the checkpoints; found {checkpoint_upload_mode!r}."
            )
        if validation and not save_checkpoints:
            raise ValueError(
                "validation= needs checkpoints to validate. Set save_checkpoints=True."
            )
        self.every_n_train_steps = every_n_train_steps
        self.every_n_epochs = every_n_epochs
        self.save_checkpoints = save_checkpoints
        self.checkpoint_upload_mode = checkpoint_upload_mode
        self.validation = validation
        self.latest_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do not report the step from which training resumes: its checkpoint exists."""
        self.latest_step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Set the progress, and report if a report by steps is due."""
        step = trainer.global_step
        self._set_progress(trainer, batch_idx)
        if self.every_n_train_steps is None or step % self.every_n_train_steps:
            return
        ends_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        is_accumulating = step == self.latest_step  # no optimizer step in this batch
        if not is_accumulating and not (
            ends_epoch and self._should_report_epoch(trainer.current_epoch)
        ):
            self._report(trainer)

    def _set_progress(self, trainer: Trainer, batch_idx: int) -> None:
        if trainer.max_steps > 0:
            train.set_progress(trainer.global_step, trainer.max_steps)
            return
        batches = trainer.num_training_batches
        if not math.isfinite(batches):
            return
        max_epochs = trainer.max_epochs or 0
        total = batches * max_epochs if max_epochs > 0 else None
        done = trainer.current_epoch * batches + batch_idx + 1
        train.set_progress(done, total, unit="batches")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report if a report by epochs is due."""
        if self._should_report_epoch(trainer.current_epoch):
            self._report(trainer)

    def _should_report_epoch(self, epoch: int) -> bool:
        return self.every_n_epochs is not None and (epoch + 1) % self.every_n_epochs == 0

    def _report(self, trainer: Trainer) -> None:
        self.latest_step = trainer.global_step
        if not self.save_checkpoints:
            train.report(logged_metrics(trainer))
            return
        with shared_checkpoint_dir() as path:
            trainer.save_checkpoint(path / self.CHECKPOINT_NAME, weights_only=False)
            report_shared_checkpoint(
                logged_metrics(trainer),
                path,
                checkpoint_upload_mode=self.checkpoint_upload_mode,
                validation=self.validation,
            )
