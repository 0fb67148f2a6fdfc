"""RayDeepSpeedStrategy: DeepSpeed on the run's process group."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from drawbar.lightning._bases import DeepSpeedStrategy
from drawbar.lightning._compat import reset_deepspeed_state
from drawbar.lightning._package import import_lightning_class
from drawbar.lightning._strategies.strategy import RayStrategy, StateDict
from drawbar.lightning._strategies.universal_checkpoint import open_for_world_size
from drawbar.torch import get_device, on_attempt_end
from drawbar.torch.integration import disable_deepspeed_shm
from drawbar.train.backend import require_package


class RayDeepSpeedStrategy(RayStrategy, DeepSpeedStrategy, base="strategies.DeepSpeedStrategy"):
    """Lightning's `DeepSpeedStrategy` on the workers of a run.

    It also trains on CPUs, with all ZeRO stages.

    Args:
        *args: Positional arguments of Lightning's `DeepSpeedStrategy`.
        **kwargs: Keyword arguments of Lightning's `DeepSpeedStrategy`, and the arguments of
            `RayStrategy`.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.

    Example:
        ```python
        trainer = L.Trainer(strategy=drawbar.lightning.RayDeepSpeedStrategy(stage=3))
        trainer = drawbar.lightning.prepare_trainer(trainer)
        ```
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require_package("deepspeed", "deepspeed")
        super().__init__(*args, **kwargs)

    @property
    def root_device(self) -> torch.device:
        """Device of this worker, with the index that DeepSpeed requires."""
        device = get_device()
        return torch.device("cpu", 0) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        """Use the run's process group in DeepSpeed until the attempt ends.

        Raises:
            RuntimeError: The worker's device differs from the device that DeepSpeed would use.
        """
        device, local_rank = self.root_device, self.local_rank
        if device.type == "cuda" and device.index != local_rank:
            raise RuntimeError(
                f"DeepSpeed uses cuda:{local_rank} on local rank {local_rank}, but this worker's "
                f"GPU is {device}. Assign one whole GPU to each worker."
            )
        if device.type == "cpu":
            disable_deepspeed_shm()
        on_attempt_end(reset_deepspeed_state)
        # Skip DeepSpeedStrategy.setup_environment, which only adds a check that rejects CPUs.
        import_lightning_class("strategies.DDPStrategy", self.package).setup_environment(self)

    def convert_for_loading(self, path: Path) -> AbstractContextManager[Path]:
        """Convert a checkpoint for the current number of workers."""
        return open_for_world_size(path, self.deepspeed_engine)

    def full_state_dict(self) -> StateDict:
        """Gather the module's weights on rank 0, one parameter at a time."""
        import deepspeed

        assert self.lightning_module is not None
        weights = {}
        for name, value in self.lightning_module.state_dict(keep_vars=True).items():
            with deepspeed.zero.GatheredParameters([value], enabled=hasattr(value, "ds_id")):
                weights[name] = value.detach().cpu().clone() if self.is_global_zero else None
        return weights
