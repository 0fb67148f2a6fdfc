"""Mixed precision for plain PyTorch training functions.

Only the common case is covered. Use `torch.amp` directly for others, such as clipping of unscaled
gradients or several dtypes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drawbar.torch._attempt_cleanup import is_in_attempt, on_attempt_end
from drawbar.torch._compat import map_tensors
from drawbar.torch._devices import get_device
from drawbar.torch._in_place import find_training

_scaler: AmpScaler | None = None


def accelerate(amp: bool | torch.dtype = False) -> None:
    """Enable mixed precision. Call it once, before any `prepare_*` function.

    Args:
        amp: True for mixed precision: float16 with scaled gradients on CUDA, bfloat16 elsewhere. A
            dtype, `torch.float16` or `torch.bfloat16`, selects this dtype. False for full
            precision.

    Raises:
        RuntimeError: Called twice; or after `prepare_model`, `prepare_optimizer`, or `backward`; or
            outside a training function; or the trainer does not use `TorchConfig`.
        ValueError: `amp` is another dtype.

    Example:
        ```python
        drawbar.torch.accelerate(amp=True)
        model = drawbar.torch.prepare_model(model)
        optimizer = drawbar.torch.prepare_optimizer(optimizer)
        ...
        drawbar.torch.backward(loss)
        optimizer.step()
        ```
    """
    device = get_device()
    if not is_in_attempt():
        raise RuntimeError(
            "accelerate() needs a trainer that uses TorchConfig. Use drawbar.torch.TorchTrainer."
        )
    if _scaler is not None:
        raise RuntimeError(
            "accelerate() must be called once, before prepare_model(), prepare_optimizer(), and "
            "backward(). Move the call to the start of the training function."
        )
    dtype = _amp_dtype(amp, device)
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"amp must be a bool, torch.float16, or torch.bfloat16, found {amp!r}.")
    _set_scaler(AmpScaler(device, dtype))


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Wrap an optimizer for gradient scaling, and record its steps for in-place recovery.

    Steps with non-finite gradients are skipped. `FailureConfig(recovery="in_place")` needs this
    function for each optimizer.

    Args:
        optimizer: Optimizer to wrap.

    Returns:
        With float16, an optimizer that unscales its gradients. Otherwise, gradients are not scaled,
        and `optimizer` is returned.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        ```python
        optimizer = drawbar.torch.prepare_optimizer(torch.optim.Adam(model.parameters()))
        ```
    """
    scaler = _get_scaler()
    if (training := find_training()) is not None:
        training.add_optimizer(optimizer)
    return ScaledOptimizer(optimizer, scaler) if scaler.is_enabled() else optimizer


def backward(tensor: torch.Tensor) -> None:
    """Run `tensor.backward()`, with a scaled loss if mixed precision needs it.

    Args:
        tensor: The loss.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        ```python
        loss = criterion(model(inputs), targets)
        drawbar.torch.backward(loss)
        ```
    """
    _get_scaler().backward(tensor)


def add_autocast_hooks(model: nn.Module) -> None:
    """Make a model compute in the dtype of `accelerate` and return float32 tensors."""
    scaler = _get_scaler()
    if scaler.dtype is not None:
        hooks = _AutocastHooks(scaler.device_type, scaler.dtype)
        model.register_forward_pre_hook(hooks.enter)
        model.register_forward_hook(hooks.leave, always_call=True)


class AmpScaler(torch.amp.GradScaler):
    """Gradient scaler of torch, with the dtype of mixed precision; None for full precision."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        # Without scaling, small gradients underflow in float16, which has few exponent bits.
        super().__init__(device.type, enabled=dtype is torch.float16)
        self.device_type = device.type
        self.dtype = dtype
        self._has_stepped = False

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of the scaled loss.

        The scale changes only here, so that several optimizers can step with the same scale.
        """
        if self._has_stepped:
            self.update()
            self._has_stepped = False
        self.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's is untyped

    def step(
        self, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object
    ) -> float | None:
        """Unscale the gradients and take a step, unless one is not finite."""
        self._has_stepped = True
        return super().step(optimizer, *args, **kwargs)


class ScaledOptimizer(torch.optim.Optimizer):
    """Optimizer that steps through the gradient scaler and delegates all else to `optimizer`."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: AmpScaler) -> None:
        # Without super().__init__(): parameters and state belong to `optimizer`.
        self.optimizer = optimizer
        self._scaler = scaler

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # returns no loss
        """Take a step with unscaled gradients, unless one is not finite.

        Raises:
            ValueError: A closure is passed. It would compute gradients without scaling.
        """
        if closure is not None:
            raise ValueError(
                "step(closure) does not work with gradient scaling. Call "
                "drawbar.torch.backward(loss), then step() without a closure."
            )
        self._scaler.step(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the optimizer."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, object]:
        """Return the state of the optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load the state of the optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add a parameter group to the optimizer."""
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: this object is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class _AutocastHooks:
    """Forward hooks of a module that enable autocast.

    A replaced `forward` would still be bound to the original in a copy of the module, for example
    in weight averaging.
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
        return map_tensors(self._to_float, output)

    def _to_float(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == self._amp_dtype else tensor


def _amp_dtype(amp: bool | torch.dtype, device: torch.device) -> torch.dtype | None:
    if amp is True:
        return torch.float16 if device.type == "cuda" else torch.bfloat16
    return None if amp is False else amp


def _get_scaler() -> AmpScaler:
    """Return the scaler of this attempt. Without `accelerate()`, set full precision."""
    return _scaler or _set_scaler(AmpScaler(get_device(), None))


def _set_scaler(scaler: AmpScaler) -> AmpScaler:
    global _scaler
    if is_in_attempt():
        on_attempt_end(_clear_scaler)
        _scaler = scaler
    return scaler


def _clear_scaler() -> None:
    global _scaler
    _scaler = None
