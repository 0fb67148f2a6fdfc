"""From the Trainer's events to `report()`."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy

from drawbar.train import ValidationTaskConfig, collective, get_checkpoint, report


class RayTrainReportCallback(TrainerCallback):
    """Reports what the Trainer logs, and makes what it saves a checkpoint of the run.

    - Every log is reported as it is, with the `step`, by all ranks; none waits for another.
    - Every save is reported with the newest value of each metric that was logged up to then. The
      checkpoint's directory is the one that the Trainer has written, `checkpoint-<step>`, with the
      parts of all ranks: `from_pretrained(result.checkpoint.path)` opens it. It is moved out of
      `output_dir`, by a rename if that lies on the filesystem of the run.
    - At the end of training these newest values are reported once more, so that `Result.metrics`
      has all.

    `save_steps`, `eval_steps` and `logging_steps` may be anything. Which checkpoints stay is set by
    `drawbar.train.CheckpointConfig`: the Trainer's `save_total_limit` finds nothing to delete. With
    the `hub_strategy` "checkpoint" or "all_checkpoints" the directory is copied instead, since the
    upload to the Hub still reads it.

    Prepare the Trainer by `prepare_trainer`.

    Args:
        validation: Have each checkpoint validated, as for `drawbar.train.report`.
    """

    CHECKPOINT_NAME = ""
    """Where in a checkpoint the Trainer's files lie: `os.path.join(path, CHECKPOINT_NAME)`."""

    def __init__(self, validation: bool | ValidationTaskConfig = False) -> None:
        self._validation = validation
        self.prepared = False
        """Whether the Trainer that calls this is a prepared one."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Check that the Trainer goes on where the run is, and give the best checkpoint its name.

        Raises:
            RuntimeError: The Trainer was not prepared.
        """
        if not self.prepared:
            raise RuntimeError(
                "RayTrainReportCallback belongs to a prepared Trainer, since any other begins anew "
                "after a restart; before trainer.train() write: trainer = prepare_trainer(trainer)"
            )
        if state.best_global_step and state.best_model_checkpoint is None:
            state.best_model_checkpoint = str(_directory(args, state.best_global_step))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        """Report the log."""
        report({**(logs or {}), "step": state.global_step})

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Report the checkpoint that the Trainer has written."""
        directory = _directory(args, state.global_step)
        collective.barrier()  # until all ranks have written their files
        report(
            newest_metrics(state),
            directory if directory.is_dir() else None,
            delete_local_checkpoint_after_upload=not _is_read_by_hub(args),
            validation=directory.is_dir() and self._validation,
        )
        committed = get_checkpoint()
        if committed is not None and state.best_global_step == state.global_step:
            state.best_model_checkpoint = committed.path

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Report the newest value of each metric."""
        report(newest_metrics(state))


def newest_metrics(state: TrainerState) -> dict[str, object]:
    """Give the newest value of each metric that was logged, and where the training is."""
    newest = {name: value for logs in state.log_history for name, value in logs.items()}
    return {**newest, "epoch": state.epoch, "step": state.global_step}


def _directory(args: TrainingArguments, step: int) -> Path:
    assert args.output_dir is not None
    return Path(os.path.abspath(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{step}")


def _is_read_by_hub(args: TrainingArguments) -> bool:
    return args.push_to_hub and args.hub_strategy in (
        HubStrategy.CHECKPOINT,
        HubStrategy.ALL_CHECKPOINTS,
    )
