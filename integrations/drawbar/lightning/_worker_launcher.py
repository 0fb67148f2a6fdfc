"""Run `fit`, `validate`, `test`, and `predict` of a worker's Trainer with the run's checkpoints.

Lightning calls the launcher of the strategy before it selects a checkpoint. A training function
therefore needs neither `prepare_trainer` nor a Trainer subclass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from drawbar.lightning._checkpoint import find_newest_checkpoint, lightning_checkpoint_path
from drawbar.lightning._prepare import prepare_trainer
from drawbar.lightning._resume import is_tuner_run, select_resume_checkpoint
from drawbar.train import Checkpoint
from drawbar.train.backend import get_recovery


class WorkerLauncher:
    """Launcher that runs the methods of a worker's Trainer in this process.

    Args:
        previous: Newest checkpoint of the last `fit` if the Trainer was created in the driver.
    """

    is_interactive_compatible = True

    def __init__(self, previous: Checkpoint | None = None) -> None:
        self._previous = previous

    def launch(
        self, function: Callable[..., object], *args: object, trainer: Any, **kwargs: object
    ) -> object:
        """Prepare the Trainer, select the checkpoint to load, and run a Trainer method."""
        prepare_trainer(trainer)
        call = inspect.signature(function).bind(*args, **kwargs)
        trainer.strategy.weights_only = call.arguments.get("weights_only")
        ckpt_path = call.arguments.get("ckpt_path")
        if trainer.state.fn == "fit" and not is_tuner_run(trainer):
            ckpt_path = select_resume_checkpoint(trainer, ckpt_path)
            ckpt_path = _skip_if_joining(trainer, ckpt_path)
        if ckpt_path == "last":
            newest = find_newest_checkpoint() or self._previous
            ckpt_path = ckpt_path if newest is None else str(lightning_checkpoint_path(newest))
        call.arguments["ckpt_path"] = ckpt_path
        return function(*call.args, **call.kwargs)

    def kill(self, signum: object) -> None:
        """Do nothing. Workers end with their run."""


def _skip_if_joining(trainer: Any, ckpt_path: Any) -> Any:
    """Return the checkpoint to load, None in a process that receives newer weights from a rank.

    Lightning checks the validation before `fit` unless it resumes within an epoch. A process that
    does not load the checkpoint would not know whether the others have checked it, so none does.
    """
    recovery = get_recovery()
    if recovery is None or ckpt_path is None:
        return ckpt_path
    trainer.num_sanity_val_steps = 0
    return None if recovery.is_joining else ckpt_path
