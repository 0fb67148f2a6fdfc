"""RayTrainReportCallback: report the Trainer's logs and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy

from drawbar.train import (
    ValidationTaskConfig,
    collective,
    get_checkpoint,
    report,
    set_progress,
    should_checkpoint,
)
from drawbar.train.backend import register_best_checkpoint
from drawbar.transformers._resume import is_complete


class RayTrainReportCallback(TrainerCallback):
    """Report the Trainer's logs and checkpoints to the run.

    - All ranks report every log with its `step`, without waiting for each other.
    - Every save is reported with the latest value of each metric. The checkpoint is the directory
      that the Trainer wrote, `checkpoint-<step>`, with the files of all ranks:
      `from_pretrained(result.checkpoint.path)` opens it. The directory is moved from `output_dir`
      to the run directory. If both are on the same filesystem, this is a rename.
    - If the run is to stop or to move, the Trainer saves after the current step, also with
      `save_strategy="no"`.
    - `Result.metrics` has the metrics of the last report. Therefore, the latest values of all
      metrics are reported once more at the end of training. After training, they are part of every
      log, for example of `evaluate()`.

    `save_steps`, `eval_steps`, and `logging_steps` can have any values; for example, a save needs
    no evaluation at the same step. Set the retention policy with `drawbar.train.CheckpointConfig`;
    the Trainer's `save_total_limit` has no effect. With `hub_strategy` "checkpoint" or
    "all_checkpoints", the directory is copied instead of moved, because the upload to the Hub still
    reads it.

    Requires a Trainer prepared by `prepare_trainer()`, which adds this callback if it is missing.
    Add it yourself to set its arguments.

    Args:
        validation: Whether to validate each checkpoint. See `drawbar.train.report()`.

    Example:
        ```python
        trainer.add_callback(RayTrainReportCallback(validation=True))
        trainer = prepare_trainer(trainer)
        ```
    """

    CHECKPOINT_NAME = ""
    """Subdirectory with the Trainer's files, empty because they are directly in the checkpoint.

    Code for Ray Train reads `os.path.join(checkpoint_path, CHECKPOINT_NAME)`.
    """

    def __init__(self, validation: bool | ValidationTaskConfig = False) -> None:
        self._validation = validation
        self._latest_metrics: dict[str, object] = {}
        self._is_training = False
        self._has_no_steps_left = False
        self.is_trainer_prepared = False
        """Whether the Trainer of this callback is prepared."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Check that the Trainer is prepared, and restore the metrics and the best checkpoint.

        Raises:
            RuntimeError: The Trainer was not prepared.
        """
        if not self.is_trainer_prepared:
            raise RuntimeError(
                "RayTrainReportCallback needs a prepared Trainer; otherwise training starts from "
                "scratch after a restart. Call trainer = prepare_trainer(trainer) before "
                "trainer.train()."
            )
        self._is_training, self._has_no_steps_left = True, is_complete(state)
        register_best_checkpoint(
            lambda: {"step": state.best_global_step} if state.best_global_step else None
        )
        self._latest_metrics = {
            name: value for logs in state.log_history for name, value in logs.items()
        }
        if state.best_global_step and state.best_model_checkpoint is None:
            state.best_model_checkpoint = str(_checkpoint_directory(args, state.best_global_step))

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Set the progress of the run, and let the Trainer save if a checkpoint is requested."""
        set_progress(state.global_step, state.max_steps if state.max_steps > 0 else None)
        if should_checkpoint():
            control.should_save = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        """Report the log."""
        if self._is_training and self._has_no_steps_left:
            return  # no steps were trained, so throughput and loss are zero
        logged = {name: _to_json_value(value) for name, value in (logs or {}).items()}
        self._latest_metrics.update(logged)
        metrics = logged if self._is_training else self._latest_metrics
        report({**metrics, "step": state.global_step})

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Report the checkpoint that the Trainer has written."""
        directory = _checkpoint_directory(args, state.global_step)
        if args.should_save:
            _clear_invalid_best_path(state, directory / TRAINER_STATE_NAME)
        collective.barrier()  # wait until all ranks have written their files
        # On nodes where the Trainer saves nothing, the directory does not exist.
        has_files = directory.is_dir()
        report(
            self._metrics_to_report(state),
            directory if has_files else None,
            delete_local_checkpoint_after_upload=not _is_uploaded_to_hub(args),
            validation=has_files and self._validation,
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
        """Report the latest value of each metric."""
        self._is_training = False
        if not self._has_no_steps_left:
            report(self._metrics_to_report(state))

    def _metrics_to_report(self, state: TrainerState) -> dict[str, object]:
        return {**self._latest_metrics, "epoch": state.epoch, "step": state.global_step}


def _to_json_value(value: Any) -> Any:
    """Convert arrays, tensors, and sets that `compute_metrics` may return to lists."""
    if isinstance(value, Mapping):
        return {key: _to_json_value(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_to_json_value, value), key=repr)
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _checkpoint_directory(args: TrainingArguments, step: int) -> Path:
    assert args.output_dir is not None
    return Path(os.path.abspath(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{step}")


def _is_uploaded_to_hub(args: TrainingArguments) -> bool:
    return args.push_to_hub and args.hub_strategy in (
        HubStrategy.CHECKPOINT,
        HubStrategy.ALL_CHECKPOINTS,
    )


def _clear_invalid_best_path(state: TrainerState, path: Path) -> None:
    """Save the state without the path of the best checkpoint if it is not valid after the commit.

    The commit moves the checkpoint, and the Trainer would warn on resume that it does not exist.
    A resume finds the best checkpoint by its step.
    """
    best = state.best_model_checkpoint
    is_moved = state.best_global_step == state.global_step or not os.path.isdir(str(best))
    if best is not None and is_moved and path.is_file():
        state.best_model_checkpoint = None
        state.save_to_json(str(path))
        state.best_model_checkpoint = best
