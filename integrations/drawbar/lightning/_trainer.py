"""prepare_trainer: a Trainer is looked over before it is used in a training function."""

from __future__ import annotations

from typing import Any, TypeVar

from drawbar.lightning._environment import RayLightningEnvironment
from drawbar.lightning._model_checkpoint import decide_who_saves
from drawbar.lightning._resume import go_on_from_newest_checkpoint
from drawbar.lightning._strategy import RayStrategy

TrainerT = TypeVar("TrainerT")


def prepare_trainer(trainer: TrainerT) -> TrainerT:
    """Check that a Lightning Trainer works on this run's workers, and give it back.

    Raises:
        TypeError: Its strategy is not one of `drawbar.lightning`, or its environment is another
            than `RayLightningEnvironment`; the message says what to write instead.
    """
    made: Any = trainer
    if not isinstance(made.strategy, RayStrategy):
        raise TypeError(f"the Trainer has strategy {type(made.strategy).__name__}")
    environment = made.strategy.cluster_environment
    if not isinstance(environment, RayLightningEnvironment):
        raise TypeError(f"the Trainer has environment {type(environment).__name__}")
    decide_who_saves(made, made.strategy.package)
    go_on_from_newest_checkpoint(made, made.strategy.package)
    return trainer
