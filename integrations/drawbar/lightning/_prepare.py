"""prepare_trainer: validate a Trainer and connect its callbacks to the run."""

from __future__ import annotations

from typing import Any, TypeVar

from drawbar.lightning._compat import get_cluster_environment
from drawbar.lightning._environment import RayLightningEnvironment
from drawbar.lightning._model_checkpoint import decide_who_saves
from drawbar.lightning._package import LateBoundBase
from drawbar.lightning._progress_bar import replace_rich_progress_bar

TrainerT = TypeVar("TrainerT")

_REPLACEMENT_STRATEGIES = {
    "FSDPStrategy": "RayFSDPStrategy",
    "DeepSpeedStrategy": "RayDeepSpeedStrategy",
    "ModelParallelStrategy": "RayModelParallelStrategy",
}
"""Replacements of Lightning's strategies; for all others, it is RayDDPStrategy."""


def prepare_trainer(trainer: TrainerT) -> TrainerT:
    """Validate a Trainer for this run and make `ModelCheckpoint` save into the run.

    The strategies of `drawbar.lightning` call it when `fit`, `validate`, `test`, or `predict`
    starts. Call it yourself to find wrong settings earlier, such as `strategy="ddp"`.

    Args:
        trainer: The `lightning` or `pytorch_lightning` Trainer of this worker. It is modified.

    Returns:
        The same Trainer.

    Raises:
        ValueError: The strategy is not from `drawbar.lightning`, so each worker would train a
            separate model; or the Trainer has a cluster environment other than
            `RayLightningEnvironment`; or a callback of the Trainer cannot save checkpoints into the
            run. The message names the replacement.

    Example:
        ```python
        def train_func():
            trainer = L.Trainer(max_epochs=3, strategy=drawbar.lightning.RayDDPStrategy())
            trainer = drawbar.lightning.prepare_trainer(trainer)
            trainer.fit(MyModule(), datamodule=MyDataModule())

        drawbar.torch.TorchTrainer(
            train_func, scaling_config=drawbar.train.ScalingConfig(num_workers=2)
        ).fit()
        ```
    """
    untyped_trainer: Any = trainer
    if not isinstance(untyped_trainer.strategy, LateBoundBase):
        strategy_name = type(untyped_trainer.strategy).__name__
        replacement = _REPLACEMENT_STRATEGIES.get(strategy_name, "RayDDPStrategy")
        raise ValueError(
            f"{strategy_name} does not work with the workers of a run. Use "
            f"Trainer(strategy=drawbar.lightning.{replacement}()) with the same arguments."
        )
    environment = get_cluster_environment(trainer)
    if environment is not None and not isinstance(environment, RayLightningEnvironment):
        raise ValueError(
            f"{type(environment).__name__} cannot be used, because the run assigns the ranks. "
            "Remove it from plugins=, or use plugins=[RayLightningEnvironment()]."
        )
    decide_who_saves(untyped_trainer, untyped_trainer.strategy.package)
    replace_rich_progress_bar(untyped_trainer, untyped_trainer.strategy.package)
    return trainer
