"""prepare_trainer: a Trainer is looked over before it is used on the workers."""

from __future__ import annotations

from typing import Any, TypeVar

from drawbar.lightning._environment import RayLightningEnvironment
from drawbar.lightning._model_checkpoint import decide_who_saves
from drawbar.lightning._package import LateBoundBase
from drawbar.lightning._progress_bar import replace_rich_progress_bar
from drawbar.lightning._resume import enable_auto_resume

TrainerT = TypeVar("TrainerT")

_REPLACEMENT_STRATEGIES = {
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
    untyped_trainer: Any = trainer
    if not isinstance(untyped_trainer.strategy, LateBoundBase):
        found = type(untyped_trainer.strategy).__name__
        ours = _REPLACEMENT_STRATEGIES.get(found, "RayDDPStrategy")
        raise ValueError(
            f"the Trainer's strategy is {found}, which knows nothing of the run's workers; write "
            f"Trainer(strategy=drawbar.lightning.{ours}()) with the same arguments"
        )
    environment = untyped_trainer._accelerator_connector._cluster_environment_flag
    if environment is not None and not isinstance(environment, RayLightningEnvironment):
        raise ValueError(
            f"the Trainer was given {type(environment).__name__}, but its ranks are those of the "
            "run; leave it out of plugins=, or write plugins=[RayLightningEnvironment()]"
        )
    decide_who_saves(untyped_trainer, untyped_trainer.strategy.package)
    replace_rich_progress_bar(untyped_trainer, untyped_trainer.strategy.package)
    enable_auto_resume(untyped_trainer)
    return trainer
