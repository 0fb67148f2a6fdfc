"""prepare_trainer: a Trainer is looked over before it is used on the workers."""

from __future__ import annotations

from typing import Any, TypeVar

from drawbar.lightning._checkpoints.resume import go_on_from_newest_checkpoint
from drawbar.lightning._environment import RayLightningEnvironment
from drawbar.lightning._model_checkpoint import decide_who_saves
from drawbar.lightning._package import OfUsersPackage
from drawbar.lightning._progress_bar import draw_as_text

TrainerT = TypeVar("TrainerT")

OURS = {
    "FSDPStrategy": "RayFSDPStrategy",
    "DeepSpeedStrategy": "RayDeepSpeedStrategy",
    "ModelParallelStrategy": "RayModelParallelStrategy",
}
"""Which strategy to write instead of one of Lightning's; for any other it is RayDDPStrategy."""


def prepare_trainer(trainer: TrainerT) -> TrainerT:
    """Check that a Lightning Trainer works on this run's workers, and give it back.

    Its `fit` then goes on from the run's newest checkpoint, if there is one that Lightning wrote
    and no `ckpt_path` is given; and what its `ModelCheckpoint` saves are checkpoints of the run.

    Raises:
        ValueError: Its strategy is not one of `drawbar.lightning`, so that each worker would train
            alone; or it was given another environment than `RayLightningEnvironment`; or its
            callbacks cannot save into the run. The message says what to write instead.
    """
    made: Any = trainer
    if not isinstance(made.strategy, OfUsersPackage):
        found = type(made.strategy).__name__
        ours = OURS.get(found, "RayDDPStrategy")
        raise ValueError(
            f"the Trainer's strategy is {found}, which knows nothing of the run's workers; write "
            f"Trainer(strategy=drawbar.lightning.{ours}()) with the same arguments"
        )
    environment = made._accelerator_connector._cluster_environment_flag
    if environment is not None and not isinstance(environment, RayLightningEnvironment):
        raise ValueError(
            f"the Trainer was given {type(environment).__name__}, but its ranks are those of the "
            "run; leave it out of plugins=, or write plugins=[RayLightningEnvironment()]"
        )
    decide_who_saves(made, made.strategy.package)
    draw_as_text(made, made.strategy.package)
    go_on_from_newest_checkpoint(made)
    return trainer
