"""prepare_model: move a model to the device and make it data-parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from drawbar.torch._devices import get_device
from drawbar.torch._in_place import InPlaceTraining, find_training
from drawbar.torch._mixed_precision import add_autocast_hooks
from drawbar.train import get_context
from drawbar.train.backend import get_forward_callback, get_recovery

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

    With one worker, the model is only moved. If a strategy is set, every rank starts with the
    weights of rank 0. Create the optimizer afterwards, because "fsdp" and "fsdp2" replace the
    parameters.

    Args:
        model: Model to prepare. For "fsdp" and "fsdp2", it may be on the meta device. In this case,
            you must initialize its weights yourself.
        move_to_device: True for `get_device()`, False to keep the model's device, or a device. The
            sharding strategies use `get_device()` if this is False.
        parallel_strategy: "ddp" for `DistributedDataParallel`; "fsdp" for
            `FullyShardedDataParallel`; "fsdp2" for `torch.distributed.fsdp.fully_shard`, which
            changes the model in place and needs torch 2.6; None to not wrap the model.
        parallel_strategy_kwargs: Further arguments of the strategy. "fsdp2" also takes `modules`:
            submodules that are sharded separately, as a list of classes or a function from a module
            to a bool. By default, the model is one unit, whose parameters are gathered at once.

    Returns:
        The wrapped model; the same object for "fsdp2" and None.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.
        ValueError: The strategy is unknown, it is None and `parallel_strategy_kwargs` is set, or
            the run recovers in place and the strategy is not "ddp".
        RuntimeError: Called outside a training function, or there are several workers but no
            process group.

    Example:
        ```python
        model = drawbar.torch.prepare_model(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ```
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"prepare_model needs a torch.nn.Module, found {model!r} ({type(model).__name__})."
        )
    _check_strategy(parallel_strategy, parallel_strategy_kwargs)
    kwargs = dict(parallel_strategy_kwargs or {})
    device = get_device() if isinstance(move_to_device, bool) else move_to_device
    add_autocast_hooks(model)
    strategy = parallel_strategy if get_context().get_world_size() > 1 else None
    if strategy is not None and not dist.is_initialized():
        raise RuntimeError(
            f"prepare_model(parallel_strategy={strategy!r}) needs an initialized process group. "
            "Use drawbar.torch.TorchTrainer instead of DataParallelTrainer."
        )
    if strategy in ("fsdp", "fsdp2") and get_recovery() is not None:
        raise ValueError(
            f"prepare_model(parallel_strategy={strategy!r}) does not work with "
            "FailureConfig(recovery='in_place'), because no other rank has the weights of a dead "
            "one. Set parallel_strategy='ddp', or recovery='restart'."
        )
    if move_to_device is not False and strategy in (None, "ddp"):
        model = model.to(device)  # the sharding strategies move one shard at a time
    match strategy:
        case "ddp":
            return _wrap_ddp(model, kwargs, find_training())
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
            f"found {strategy!r}."
        )
    if strategy is None and kwargs:
        raise ValueError(
            f"parallel_strategy_kwargs has {', '.join(map(repr, kwargs))}, but parallel_strategy "
            "is None. Set a strategy, or remove the arguments."
        )


def _wrap_ddp(
    model: nn.Module, kwargs: dict[str, Any], training: InPlaceTraining | None
) -> nn.Module:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    device_ids = [device] if device.type == "cuda" else None
    if training is not None:
        wrapped = training.wrap_model(model, kwargs)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model, **{"device_ids": device_ids, **kwargs})
    timer = _ForwardTimer()
    wrapped.register_forward_pre_hook(timer.begin)
    wrapped.register_forward_hook(timer.end)
    return wrapped


class _ForwardTimer:
    """Hooks that measure the forward passes of a model, to find ranks that are slow.

    On a GPU, this is the time that the rank needs to launch the kernels. Copies of the model, for
    example in a file of `torch.save`, are not measured.
    """

    def __init__(self) -> None:
        self._add_seconds: Callable[[float], None] | None = get_forward_callback()
        self._start = 0.0

    def __getstate__(self) -> dict[str, object]:
        return {"_add_seconds": None, "_start": 0.0}

    def begin(self, module: nn.Module, inputs: object) -> None:
        self._start = time.perf_counter()

    def end(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if self._add_seconds is not None:
            self._add_seconds(time.perf_counter() - self._start)


def _wrap_fsdp(model: nn.Module, device: torch.device, kwargs: dict[str, Any]) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    _broadcast_weights(model, device)  # FSDP's `sync_module_states` does not support CPUs
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
            f'parallel_strategy="fsdp2" needs torch 2.6 or newer, found {torch.__version__}. '
            'Upgrade torch, or use parallel_strategy="fsdp".'
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
    """Copy the weights of rank 0 to every rank, one tensor at a time. DDP does this itself."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                on_device = tensor.to(device)
                dist.broadcast(on_device, src=0)
                tensor.copy_(on_device)


def _isinstance_predicate(classes: tuple[type[nn.Module], ...]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, classes)
