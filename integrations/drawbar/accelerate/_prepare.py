"""Helpers for training functions written with Accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drawbar.train.backend import get_agreed_checkpoint, make_import_error, require_package

try:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType
except ImportError as error:
    raise make_import_error("accelerate", extra="accelerate") from error

from drawbar.train import get_context

require_package("accelerate", extra="accelerate", min_version="1.0")

_SHARDING = {
    "ACCELERATE_USE_FSDP": DistributedType.FSDP,
    "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED,
}


def check_accelerator(accelerator: Accelerator) -> Accelerator:
    """Check that an `Accelerator` is what was asked for, where Accelerate itself says nothing.

    `report_state` and `load_state` do so too.

    Raises:
        RuntimeError: Called outside a training function; the `Accelerator` has another rank or
            world size than the worker; or it was given an FSDP or DeepSpeed plugin and does without
            it, as Accelerate does on CPUs.
    """
    require_matching_ranks(accelerator.num_processes, accelerator.process_index, "Accelerator")
    for variable, kind in _SHARDING.items():
        wanted = os.environ.get(variable, "").lower() == "true"
        if wanted and accelerator.distributed_type != kind:
            raise RuntimeError(
                f"this Accelerator was given a plugin for {kind.value} and does without: it is "
                f"{accelerator.distributed_type.value}, since Accelerate shards models on GPUs "
                "only. Set ScalingConfig(use_gpu=True); to shard on CPUs, use "
                'drawbar.torch.prepare_model(model, parallel_strategy="fsdp2"), or the Trainer of '
                "Transformers with drawbar.transformers.prepare_trainer"
            )
    return accelerator


def require_matching_ranks(world_size: int, rank: int, name: str) -> None:
    """Check that a framework has the worker's rank and world size.

    Raises:
        RuntimeError: It has others; the message says what to do.
    """
    context = get_context()
    if (world_size, rank) == (context.get_world_size(), context.get_world_rank()):
        return
    raise RuntimeError(
        f"this {name} takes itself for rank {rank} of {world_size}, but the worker is rank "
        f"{context.get_world_rank()} of {context.get_world_size()}. Make it inside the training "
        "function of a drawbar.torch.TorchTrainer, and leave the ACCELERATE_* variables alone; if "
        "the function makes a PartialState before it, write PartialState(cpu=True) on CPU workers"
    )


def load_state(accelerator: Accelerator, **kwargs: object) -> dict[str, Any] | None:
    """Load what `report_state` saved into everything that the `Accelerator` has prepared.

    Call it on all ranks after `accelerator.prepare`. The checkpoint is the run's newest one, also
    after a restart.

    Args:
        accelerator: The one whose `prepare` was given model, optimizer and scheduler.
        kwargs: Further arguments of `Accelerator.load_state`.

    Returns:
        The metrics that were reported with the checkpoint; None if the run has no checkpoint yet.
    """
    check_accelerator(accelerator)
    checkpoint = get_agreed_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as path:
        accelerator.load_state(path, **kwargs)
    return dict(checkpoint.manifest.metrics) if checkpoint.manifest else {}


@contextmanager
def allow_sharding_on_cpu() -> Iterator[None]:
    """Have an `Accelerator` that is made inside take its FSDP or DeepSpeed plugin on a CPU worker.

    Accelerate takes these plugins where the processes have GPUs. What follows from them works on
    CPUs as well, so its state says, while the `Accelerator` is made, that there are GPUs. To be
    used only where there is such a plugin, which then replaces what the state says.
    """
    on_cpu = os.environ.pop("ACCELERATE_USE_CPU", None)
    AcceleratorState._reset_state()
    PartialState(cpu=on_cpu is not None)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    try:
        yield
    finally:
        if on_cpu is not None:
            os.environ["ACCELERATE_USE_CPU"] = on_cpu
