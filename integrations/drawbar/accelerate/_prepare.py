"""check_accelerator: check that an Accelerator matches its worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from drawbar.train.backend import make_import_error, require_package

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise make_import_error("accelerate", extra="accelerate") from error

from drawbar.accelerate._compat import declare_gpus
from drawbar.train import get_context

require_package("accelerate", extra="accelerate", min_version="1.0")

_SHARDING_ENV = {
    "ACCELERATE_USE_FSDP": DistributedType.FSDP,
    "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED,
}


def check_accelerator(accelerator: Accelerator) -> Accelerator:
    """Check that an `Accelerator` has the rank of its worker and the requested sharding.

    On CPUs, Accelerate silently ignores FSDP and DeepSpeed plugins. `report_state()` and
    `load_state()` make the same checks.

    Args:
        accelerator: Accelerator to check.

    Returns:
        The same object.

    Raises:
        RuntimeError: Called outside a training function; or the Accelerator has another rank or
            world size than the worker; or Accelerate ignored its FSDP or DeepSpeed plugin.

    Example:
        ```python
        accelerator = check_accelerator(Accelerator(fsdp_plugin=plugin))
        ```
    """
    require_matching_ranks(accelerator.num_processes, accelerator.process_index, "Accelerator")
    for variable, distributed_type in _SHARDING_ENV.items():
        is_requested = os.environ.get(variable, "").lower() == "true"
        if is_requested and accelerator.distributed_type != distributed_type:
            raise RuntimeError(
                f"Accelerate ignored the {distributed_type.value} plugin because the workers have "
                f"no GPU (distributed type {accelerator.distributed_type.value}). Set "
                "ScalingConfig(use_gpu=True), or shard on CPUs with "
                "drawbar.torch.prepare_model(model, parallel_strategy='fsdp2') or "
                "drawbar.transformers.prepare_trainer(trainer)."
            )
    return accelerator


def require_matching_ranks(world_size: int, rank: int, name: str) -> None:
    """Check that a framework object has the worker's rank and world size.

    Args:
        world_size: World size of the framework object.
        rank: Rank of the framework object.
        name: Name of the framework object for the error message.

    Raises:
        RuntimeError: The rank or the world size differs.

    Example:
        ```python
        require_matching_ranks(args.world_size, args.process_index, "Trainer")
        ```
    """
    context = get_context()
    if (world_size, rank) == (context.get_world_size(), context.get_world_rank()):
        return
    raise RuntimeError(
        f"The {name} has rank {rank} of {world_size}, but this worker has rank "
        f"{context.get_world_rank()} of {context.get_world_size()}. Create it inside the training "
        "function of drawbar.torch.TorchTrainer and do not set ACCELERATE_* variables; on CPUs, "
        "use PartialState(cpu=True)."
    )


@contextmanager
def allow_sharding_on_cpu() -> Iterator[None]:
    """Let Accelerators created in the `with` block use FSDP or DeepSpeed plugins on CPU workers.

    Accelerate accepts these plugins only if the processes have GPUs, but they also work on CPUs. So
    its state declares GPUs while the Accelerator is created. Use this only if there is a plugin:
    the plugin then replaces the declared distributed type.

    Returns:
        A context manager.

    Example:
        ```python
        with allow_sharding_on_cpu():
            trainer.create_accelerator_and_postprocess()
        ```
    """
    use_cpu_env = os.environ.pop("ACCELERATE_USE_CPU", None)
    declare_gpus(is_cpu_requested=use_cpu_env is not None)
    try:
        yield
    finally:
        if use_cpu_env is not None:
            os.environ["ACCELERATE_USE_CPU"] = use_cpu_env
