"""Count devices that only PyTorch knows."""

from __future__ import annotations


def count_devices(kind: str) -> int | None:
    """Return the number of devices of this machine. Imports torch.

    Args:
        kind: "auto" for the accelerator of this machine, "gpu" for GPUs of NVIDIA and AMD, or a
            type of `torch.device`, such as "xpu".

    Returns:
        The number of devices; 0 without PyTorch, or None if PyTorch does not know the kind.
    """
    try:
        import torch
    except ImportError:
        return 0 if kind in ("auto", "gpu", "xpu") else None
    if kind == "auto":
        # torch 2.4 and 2.5 do not have torch.accelerator.
        module = getattr(torch, "accelerator", torch.cuda)
    elif kind == "gpu":
        module = torch.cuda
    else:
        try:
            module = torch.get_device_module(kind)
        except RuntimeError:
            return None
    try:
        return int(module.device_count()) if module.is_available() else 0
    except AttributeError:  # torch.cpu and torch.mps have only some of these functions
        return None
