"""What a Trainer in the driver is told about devices: those of the workers, not its own.

Lightning chooses accelerator and precision as a Trainer is made. The driver may have no GPU where
the workers have some, or the reverse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from drawbar.lightning._package import LateBoundBase, bind_base
from drawbar.train import ScalingConfig

if TYPE_CHECKING:
    from lightning.pytorch.accelerators import CUDAAccelerator
else:
    CUDAAccelerator = object


class RemoteCUDAAccelerator(LateBoundBase, CUDAAccelerator, base="accelerators.CUDAAccelerator"):
    """The workers' GPUs, for a driver that has none."""

    @staticmethod
    def is_available() -> bool:
        """True: the workers have them."""
        return True

    @staticmethod
    def auto_device_count() -> int:
        """Give 1: what counts is the number of workers."""
        return 1

    @staticmethod
    def parse_devices(devices: object) -> list[int]:
        """Give the one device of a worker, whatever the Trainer was told."""
        return [0]


def configure_for_workers(strategy: Any, scaling_config: ScalingConfig) -> None:
    """Have the Trainer that gets this strategy made for the workers' devices."""
    if scaling_config.use_gpu and not torch.cuda.is_available():
        strategy.accelerator = bind_base(RemoteCUDAAccelerator, strategy.package)()
        return
    kind = "cuda" if scaling_config.use_gpu else "cpu"
    count = max(scaling_config.max_workers, 1)
    strategy.parallel_devices = [torch.device(kind, index) for index in range(count)]
