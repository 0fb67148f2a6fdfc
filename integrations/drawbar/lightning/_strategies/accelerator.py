"""Configure a driver-side Trainer for the workers' devices.

Lightning selects accelerator and precision when a Trainer is created. The driver may have no GPU
while the workers have GPUs, or the reverse.
"""

from __future__ import annotations

from typing import Any

import torch

from drawbar.lightning._bases import CUDAAccelerator
from drawbar.lightning._package import LateBoundBase, bind_base
from drawbar.train import ScalingConfig


class RemoteCUDAAccelerator(LateBoundBase, CUDAAccelerator, base="accelerators.CUDAAccelerator"):
    """CUDA accelerator for a driver without GPUs whose workers have them."""

    @staticmethod
    def is_available() -> bool:
        """Return True, because the workers have GPUs."""
        return True

    @staticmethod
    def auto_device_count() -> int:
        """Return 1, because each worker uses one GPU."""
        return 1

    @staticmethod
    def parse_devices(devices: object) -> list[int]:
        """Return the one device of a worker, regardless of the Trainer's `devices`."""
        return [0]


def configure_for_workers(strategy: Any, scaling_config: ScalingConfig) -> None:
    """Configure a strategy so that its Trainer is created for the workers' devices."""
    if scaling_config.use_gpu and not torch.cuda.is_available():
        strategy.accelerator = bind_base(RemoteCUDAAccelerator, strategy.package)()
        return
    kind = "cuda" if scaling_config.use_gpu else "cpu"
    count = max(scaling_config.max_workers, 1)
    strategy.parallel_devices = [torch.device(kind, index) for index in range(count)]
