"""RayLightningEnvironment: ranks and sizes from the run."""

from __future__ import annotations

import os

from drawbar.lightning._bases import ClusterEnvironment
from drawbar.lightning._package import LateBoundBase
from drawbar.train import get_context


class RayLightningEnvironment(
    LateBoundBase, ClusterEnvironment, base="plugins.environments.ClusterEnvironment"
):
    """Cluster environment that provides the ranks and sizes of the run.

    The values come from `drawbar.train.get_context()`. The strategies of `drawbar.lightning` add
    this environment automatically; `plugins=[RayLightningEnvironment()]` is allowed but not needed.

    Every method raises RuntimeError outside a training function.

    Args:
        *args: Passed to Lightning's `ClusterEnvironment`, which takes no arguments.
        **kwargs: Passed to Lightning's `ClusterEnvironment`, which takes no arguments.

    Example:
        ```python
        trainer = L.Trainer(
            strategy=drawbar.lightning.RayDDPStrategy(),
            plugins=[drawbar.lightning.RayLightningEnvironment()],
        )
        ```
    """

    @property
    def creates_processes_externally(self) -> bool:
        """Always True, because Ray has already started the workers."""
        return True

    @property
    def main_address(self) -> str:
        """Address of the process group's store (MASTER_ADDR, set by `drawbar.torch`).

        Raises:
            RuntimeError: MASTER_ADDR is not set, because the run has no torch process group.
        """
        return _require_env("MASTER_ADDR")

    @property
    def main_port(self) -> int:
        """Port of the process group's store (MASTER_PORT, set by `drawbar.torch`).

        Raises:
            RuntimeError: MASTER_PORT is not set, because the run has no torch process group.
        """
        return int(_require_env("MASTER_PORT"))

    @staticmethod
    def detect() -> bool:
        """Return whether this process runs a training function."""
        return is_in_training_function()

    def world_size(self) -> int:
        """Return the number of workers."""
        return get_context().get_world_size()

    def set_world_size(self, size: int) -> None:
        """Do nothing. Sizes come from the run."""

    def global_rank(self) -> int:
        """Return this worker's rank among all workers, from 0."""
        return get_context().get_world_rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing. Ranks come from the run."""

    def local_rank(self) -> int:
        """Return this worker's rank on its node, from 0."""
        return get_context().get_local_rank()

    def node_rank(self) -> int:
        """Return the index of this worker's node, from 0."""
        return get_context().get_node_rank()


def is_in_training_function() -> bool:
    """Return whether this code runs in the training function of a Drawbar trainer."""
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
            f"{variable} is not set in this worker. Run the training function with "
            'drawbar.torch.TorchTrainer and TorchConfig(init_method="env"), the default.'
        ) from None
