"""Resuming a Trainer in its own run: callback states, and trainings that are already complete."""

from __future__ import annotations

import os
import warnings
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from drawbar.train import Checkpoint, get_context


def load_state_of_this_run(checkpoint: Checkpoint, path: str) -> TrainerState | None:
    """Return the Trainer's state in a checkpoint; None if another run made the checkpoint.

    Args:
        checkpoint: A Trainer's checkpoint.
        path: A local directory with its files.
    """
    manifest = checkpoint.manifest
    if manifest is None or manifest.run_id != get_context().get_run_id():
        return None
    state: TrainerState = TrainerState.load_from_json(os.path.join(path, TRAINER_STATE_NAME))
    return state


def was_stopped(state: TrainerState) -> bool:
    """Return whether a callback such as `EarlyStoppingCallback` stopped training at this step."""
    control = _saved_callbacks(state).get(TrainerControl.__name__, {})
    should_stop = isinstance(control, dict) and control.get("args", {}).get("should_training_stop")
    # The Trainer also sets it at the last step. A resumed run may still train more epochs.
    return bool(should_stop) and state.global_step < state.max_steps


def is_complete(state: TrainerState) -> bool:
    """Return whether there are no steps left to train."""
    return 0 < state.max_steps <= state.global_step


def restore_callbacks(callbacks: list[TrainerCallback], state: TrainerState) -> None:
    """Restore what callbacks counted, such as the patience of `EarlyStoppingCallback`.

    Unlike with `restore_callback_states_from_checkpoint=True`, the callbacks remain the user's
    objects, and keep the arguments they were created with.
    """
    for name, saved in _saved_callbacks(state).items():
        instances = [callback for callback in callbacks if type(callback).__name__ == name]
        states = saved if isinstance(saved, list) else [saved]
        # For several callbacks of a class, the Trainer appends their states at each save.
        for callback, values in zip(instances, states[-len(instances) :], strict=False):
            if isinstance(callback, ExportableState):
                vars(callback).update(values.get("attributes", {}))


def _saved_callbacks(state: TrainerState) -> dict[str, Any]:
    """Return the saved states by class name: one, or a list for several callbacks of a class."""
    saved: Any = state.stateful_callbacks  # annotated as a list, which it is only before training
    return saved if isinstance(saved, dict) else {}


class SkipCompleteTraining(TrainerCallback):
    """Make `train()` end without a step if training is complete.

    If training ended within an epoch, Transformers would train one more step to find that out.
    """

    def __init__(self) -> None:
        self._skips = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Stop before the first step."""
        self._skips = is_complete(state)
        if self._skips:
            control.should_training_stop = True

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Cancel the actions at the end of an epoch that had no steps."""
        if self._skips:
            control.should_log = control.should_evaluate = control.should_save = False


class WarnOfOtherTotalSteps(TrainerCallback):
    """Warn if the total number of steps differs from before the resume.

    It changes with the number of workers and the batch size. Learning rates are computed from it,
    so they jump at the resume.

    Args:
        saved: State in the checkpoint.
    """

    def __init__(self, saved: TrainerState) -> None:
        self._saved = saved

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Compare the totals."""
        saved = self._saved
        has_same_epochs = saved.num_train_epochs == state.num_train_epochs and args.max_steps <= 0
        if state.is_world_process_zero and has_same_epochs and saved.max_steps != state.max_steps:
            warnings.warn(
                f"{state.num_train_epochs} epochs have {state.max_steps} steps now, and had "
                f"{saved.max_steps} before the resume, because the number of workers or the batch "
                "size has changed. The learning rate jumps. To keep its schedule, set "
                f"TrainingArguments(max_steps={saved.max_steps}) and the same global batch size.",
                stacklevel=2,
            )
