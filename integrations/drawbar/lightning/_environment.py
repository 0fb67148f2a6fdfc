"""RayLightningEnvironment: Lightning takes its ranks from the run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from drawbar.lightning._package import LateBoundBase
from drawbar.train import get_context

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment
else:
    ClusterEnvironment = object


class RayLightningEnvironment(
    LateBoundBase, ClusterEnvironment, base="plugins.environments.ClusterEnvironment"
):
    """Tells Lightning this worker's ranks and sizes, as `drawbar.train.get_context()` has them.

    The strategies of `drawbar.lightning` use it by themselves, so that a Trainer needs no
    `plugins=[RayLightningEnvironment()]`; it does no harm.

    Every method raises RuntimeError outside a training function.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """True: the workers run already."""
        return True

    @property
    def main_address(self) -> str:
        """Address of the process group's store: MASTER_ADDR, which `drawbar.torch` sets.

        Raises:
            RuntimeError: It is not set, since the run has no process group of `drawbar.torch`.
        """
        return _require_env("MASTER_ADDR")

    @property
    def main_port(self) -> int:
        """Port of the process group's store: MASTER_PORT, which `drawbar.torch` sets.

        Raises:
            RuntimeError: It is not set, since the run has no process group of `drawbar.torch`.
        """
        return int(_require_env("MASTER_PORT"))

    @staticmethod
    def detect() -> bool:
        """Whether this process is inside a training function."""
        return is_in_training_function()

    def world_size(self) -> int:
        """Number of workers."""
        return get_context().get_world_size()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the run knows."""

    def global_rank(self) -> int:
        """This worker's number among all, from 0."""
        return get_context().get_world_rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the run knows."""

    def local_rank(self) -> int:
        """This worker's number among those on its node, from 0."""
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        """Number of this node among those with workers, from 0."""
        return get_context().get_node_rank()


def is_in_training_function() -> bool:
    """Whether this is a worker, inside the training function that a Drawbar trainer runs."""
    try:
        get_context()
    except RuntimeError:
        return False
    return True


def _require_env(variable: str) -> str:
    try:
        return os.environ[variable]
    except KeyError:
        raise RuntimeError(
            f"{variable} is not set in this worker; run the training function with "
            'drawbar.torch.TorchTrainer and TorchConfig(init_method="env"), which is the default'
        ) from None
