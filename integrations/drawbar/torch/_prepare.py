"""Models in the training function: moved to the worker's device and made data-parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from drawbar.torch._devices import get_device
from drawbar.torch._mixed_precision import add_autocast_hooks
from drawbar.train import get_context

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ParallelStrategy = Literal["ddp", "fsdp", "fsdp2"]


def prepare_model(
    model: nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: ParallelStrategy | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Move a model to this worker's device and make it data-parallel over all workers.

    With one worker the model is only moved, whatever the strategy: there is nothing to share. Every
    rank starts with rank 0's weights. Make the optimizer after this, since "fsdp" and "fsdp2"
    replace the parameters.

    Args:
        model: The model. It may be on the meta device if it is to be sharded; its weights are then
            yours to initialise.
        move_to_device: True for `get_device()`, False to leave the model where it is, or a device.
            The sharding strategies work on `get_device()` if this is False.
        parallel_strategy: "ddp" for `DistributedDataParallel`; "fsdp" for
            `FullyShardedDataParallel`; "fsdp2" for `torch.distributed.fsdp.fully_shard`, which
            changes the model in place and needs torch 2.6; None to leave the model as it is.
        parallel_strategy_kwargs: Further arguments of the strategy. "fsdp2" takes here also
            `modules`: which submodules are sharded each on their own, as a list of classes or a
            function from a module to a bool. Without it the model is one unit, whose parameters are
            all gathered at once.

    Raises:
        TypeError: `model` is no `torch.nn.Module`.
        ValueError: The strategy has no such name, or has arguments where there is none.
        RuntimeError: Called outside a training function, or where several workers have no process
            group.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"prepare_model takes a torch.nn.Module, found {model!r} ({type(model).__name__})"
        )
    _check_strategy(parallel_strategy, parallel_strategy_kwargs)
    kwargs = dict(parallel_strategy_kwargs or {})
    device = get_device() if isinstance(move_to_device, bool) else move_to_device
    add_autocast_hooks(model)
    strategy = parallel_strategy if get_context().get_world_size() > 1 else None
    if strategy is not None and not dist.is_initialized():
        raise RuntimeError(
            f"prepare_model(parallel_strategy={strategy!r}) needs the process group of all "
            f"{get_context().get_world_size()} workers, and there is none; run the function with a "
            "drawbar.torch.TorchTrainer, which makes it, instead of a DataParallelTrainer"
        )
    if move_to_device is not False and strategy in (None, "ddp"):
        model = model.to(device)  # the sharding strategies move one shard at a time
    match strategy:
        case "ddp":
            return _wrap_ddp(model, kwargs)
        case "fsdp":
            return _wrap_fsdp(model, device, kwargs)
        case "fsdp2":
            return _apply_fully_shard(model, device, **kwargs)
    return model


def _check_strategy(strategy: object, kwargs: Mapping[str, object] | None) -> None:
    names = get_args(ParallelStrategy)
    if strategy is not None and strategy not in names:
        raise ValueError(
            f"parallel_strategy must be one of {', '.join(map(repr, names))} or None, "
            f"found {strategy!r}"
        )
    if strategy is None and kwargs:
        raise ValueError(
            f"parallel_strategy_kwargs has {', '.join(map(repr, kwargs))}, "
            "but parallel_strategy is None"
        )


def _wrap_ddp(model: nn.Module, kwargs: dict[str, Any]) -> nn.Module:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    device_ids = [device] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, **{"device_ids": device_ids, **kwargs})


def _wrap_fsdp(model: nn.Module, device: torch.device, kwargs: dict[str, Any]) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    _broadcast_weights(model, device)  # its own `sync_module_states` refuses CPUs
    return FullyShardedDataParallel(model, **{"device_id": device, **kwargs})


def _apply_fully_shard(
    model: nn.Module,
    device: torch.device,
    *,
    modules: Iterable[type[nn.Module]] | Callable[[nn.Module], bool] = (),
    mesh: DeviceMesh | None = None,
    **kwargs: Any,
) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as missing:
        raise ImportError(
            f'parallel_strategy="fsdp2" needs torch 2.6 or newer, found {torch.__version__}'
        ) from missing
    if mesh is None:
        mesh = init_device_mesh(device.type, (get_context().get_world_size(),))
    _broadcast_weights(model, device)
    should_shard = modules if callable(modules) else _isinstance_predicate(tuple(modules))
    for module in reversed(list(model.modules())):  # children before their parents
        if module is not model and should_shard(module):
            fully_shard(module, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    return model


def _broadcast_weights(model: nn.Module, device: torch.device) -> None:
    """Give every rank the weights of rank 0, a tensor at a time, as DDP does by itself."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                on_device = tensor.to(device)
                dist.broadcast(on_device, src=0)
                tensor.copy_(on_device)


def _isinstance_predicate(classes: tuple[type[nn.Module], ...]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, classes)
