"""Mixed precision by three calls, for training functions that have no framework around them.

    drawbar.torch.accelerate(amp=True)
    model = drawbar.torch.prepare_model(model)
    optimizer = drawbar.torch.prepare_optimizer(optimizer)
    ...
    drawbar.torch.backward(loss)
    optimizer.step()

Thin on purpose: what needs more (clipping of unscaled gradients, several dtypes) is a few lines of
`torch.amp`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from drawbar.torch._attempt_cleanup import is_in_attempt, on_attempt_end
from drawbar.torch._devices import get_device

_precision: AmpScaler | None = None


def accelerate(amp: bool | torch.dtype = False) -> None:
    """Choose the precision of this training function. Call it once, before any `prepare_` function.

    Args:
        amp: True for mixed precision: float16 with scaled gradients on CUDA, bfloat16 elsewhere. A
            dtype, `torch.float16` or `torch.bfloat16`, chooses that one. False is full precision.

    Raises:
        RuntimeError: Called twice, after a function that depends on it, or outside a training
            function of a trainer that uses `TorchConfig`.
        ValueError: Mixed precision has no such dtype.
    """
    device = get_device()
    if not is_in_attempt():
        raise RuntimeError(
            "accelerate() needs a trainer that uses TorchConfig, as TorchTrainer does"
        )
    if _precision is not None:
        raise RuntimeError(
            "accelerate() must be called once, before prepare_model, prepare_optimizer and backward"
        )
    dtype = _amp_dtype(amp, device)
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"amp must be a bool, torch.float16 or torch.bfloat16, found {amp!r}")
    _set_scaler(AmpScaler(device, dtype))


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Have an optimizer unscale its gradients, and leave a step out if one of them is not finite.

    Where gradients are not scaled, that is without float16, the optimizer itself comes back.
    """
    precision = _get_scaler()
    return ScaledOptimizer(optimizer, precision) if precision.is_enabled() else optimizer


def backward(tensor: torch.Tensor) -> None:
    """Do `tensor.backward()`, on a scaled loss if the precision chosen by `accelerate` needs it."""
    _get_scaler().backward(tensor)


def add_autocast_hooks(model: nn.Module) -> None:
    """Have a model compute in the precision chosen by `accelerate` and give results in float32."""
    precision = _get_scaler()
    if precision.dtype is not None:
        hooks = _AutocastHooks(precision.device_type, precision.dtype)
        model.register_forward_pre_hook(hooks.enter)
        model.register_forward_hook(hooks.leave, always_call=True)


class AmpScaler(torch.amp.GradScaler):
    """Torch's gradient scaler, and beside it the dtype to compute in; None is full precision."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        # Only float16 has so few exponents that small gradients would be lost unscaled.
        super().__init__(device.type, enabled=dtype is torch.float16)
        self.device_type = device.type
        self.dtype = dtype
        self._stepped = False

    def backward(self, loss: torch.Tensor) -> None:
        """Go backward from the scaled loss.

        The scale changes only here, so that several optimizers can step under the same one.
        """
        if self._stepped:
            self.update()
            self._stepped = False
        self.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's is untyped

    def step(
        self, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object
    ) -> float | None:
        """Unscale the gradients and take a step, unless one is not finite."""
        self._stepped = True
        return super().step(optimizer, *args, **kwargs)


class ScaledOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps go through the gradient scaler. All else is that of `optimizer`."""

    def __init__(self, optimizer: torch.optim.Optimizer, precision: AmpScaler) -> None:
        # Without super().__init__(): parameters and state stay with `optimizer`, which this one
        # only shows.
        self.optimizer = optimizer
        self._precision = precision

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # gives no loss back
        """Take a step with unscaled gradients, unless one is not finite.

        Raises:
            ValueError: A closure was given; it would compute its gradients without scaling.
        """
        if closure is not None:
            raise ValueError("an optimizer with scaled gradients takes no closure; use backward()")
        self._precision.step(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do what the optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, object]:
        """Give the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load the optimizer's state."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Do what the optimizer does."""
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: this object is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class _AutocastHooks:
    """Autocast around a module's forward, as hooks.

    A replaced `forward` would still be bound to this module in a copy of it, as averaging makes.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._device_type = device_type
        self._amp_dtype = dtype
        self._active: list[torch.autocast] = []

    def enter(self, module: nn.Module, inputs: object) -> None:
        autocast = torch.autocast(self._device_type, self._amp_dtype)
        autocast.__enter__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self._active.append(autocast)

    def leave(self, module: nn.Module, inputs: object, output: object) -> object:
        if self._active:
            self._active.pop().__exit__(None, None, None)
        return tree_map_only(torch.Tensor, self._to_float, output)

    def _to_float(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == self._amp_dtype else tensor


def _amp_dtype(amp: bool | torch.dtype, device: torch.device) -> torch.dtype | None:
    if amp is True:
        return torch.float16 if device.type == "cuda" else torch.bfloat16
    return None if amp is False else amp


def _get_scaler() -> AmpScaler:
    """Give the precision chosen, which is full precision if none was; from now on it is chosen."""
    return _precision or _set_scaler(AmpScaler(get_device(), None))


def _set_scaler(precision: AmpScaler) -> AmpScaler:
    global _precision
    if is_in_attempt():
        on_attempt_end(_clear_scaler)
        _precision = precision
    return precision


def _clear_scaler() -> None:
    global _precision
    _precision = None
