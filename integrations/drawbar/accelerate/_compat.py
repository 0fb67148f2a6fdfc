"""Private APIs of Accelerate, read in Accelerate 1.0 to 1.15. No other file uses them."""

from __future__ import annotations

from typing import Any, cast

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def declare_gpus(*, is_cpu_requested: bool) -> None:
    """Create a new state of Accelerate with the distributed type of processes that have GPUs.

    Accelerate has no setting that allows its plugins on CPUs. If its state changes, Accelerate
    ignores the plugins, which `check_accelerator` reports.
    """
    AcceleratorState._reset_state()
    PartialState(cpu=is_cpu_requested)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def get_prepared_loaders(accelerator: Accelerator) -> list[Any]:
    """Return the data loaders that an Accelerator has prepared, in this order."""
    return list(cast("Any", accelerator)._dataloaders)
