"""Lightning's strategies on the workers of a run.

Lightning derives ranks, devices and process groups from what its Trainer was told. Here all three
exist already: the run has placed the workers, Ray has given each its device, and `drawbar.torch`
has made the process group. So each strategy is Lightning's own, with those three taken from the
run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from drawbar.lightning._checkpoints import CommitsCheckpoints
from drawbar.lightning._environment import RayLightningEnvironment, in_training_function
from drawbar.lightning._package import OfUsersPackage, with_base
from drawbar.torch import get_device

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.strategies.parallel import ParallelStrategy
else:
    DDPStrategy = ParallelStrategy = object


class RayStrategy(CommitsCheckpoints, OfUsersPackage, ParallelStrategy):
    """What the strategies have in common: ranks, device and process group are the run's."""

    @property
    def root_device(self) -> torch.device:
        """The device that Ray gave to this worker; see `drawbar.torch.get_device`."""
        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How the data is divided: among all workers of the run."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Take the ranks from the run. Lightning calls it as the Trainer is made, and later again.

        Raises:
            RuntimeError: The Trainer is not made in a training function.
        """
        if not in_training_function():
            raise RuntimeError(f"{type(self).__name__} works inside a training function")
        if not isinstance(self.cluster_environment, RayLightningEnvironment):
            self.cluster_environment = with_base(RayLightningEnvironment, self.package)()
        super().set_world_ranks()  # type: ignore[misc]  # ParallelStrategy's subclasses all have it

    def _configure_launcher(self) -> None:
        """Start no processes: the workers run already."""

    def setup_environment(self) -> None:
        """Join the run's process group.

        Raises:
            RuntimeError: There is none.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                f"{type(self).__name__} finds no process group in this worker; run the training "
                "function with drawbar.torch.TorchTrainer, which makes it"
            )
        super().setup_environment()


class RayDDPStrategy(RayStrategy, DDPStrategy, base="strategies.DDPStrategy"):
    """Lightning's `DDPStrategy` on the workers of a run.

    All arguments are those of `DDPStrategy`.
    """
