"""Map the GPUs that Ray assigned to this worker to torch devices."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from drawbar.train import get_context


def get_device() -> torch.device:
    """Return this worker's device, or its first GPU if it has several.

    Returns:
        The first device of `get_devices()`.

    Raises:
        RuntimeError: Called outside a training function, or torch cannot use the GPUs that Ray
            assigned to the worker.

    Example:
        ```python
        batch = batch.to(drawbar.torch.get_device())
        ```
    """
    return get_devices()[0]


def get_devices() -> list[torch.device]:
    """Return this worker's devices.

    Returns:
        The GPUs that Ray assigned to the worker; without GPUs, MPS on a Mac with one worker,
        otherwise the CPU. A worker sees all GPUs of the run on its node, so its first GPU may have
        another index than 0.

    Raises:
        RuntimeError: Called outside a training function, or torch cannot use the GPUs that Ray
            assigned to the worker.

    Example:
        ```python
        first, second = drawbar.torch.get_devices()
        ```
    """
    context = get_context()
    gpu_ids = context.get_accelerator_ids()
    if gpu_ids:
        _require_cuda(gpu_ids)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return [torch.device("cuda", index) for index in cuda_indices(gpu_ids, visible)]
    # `torch.distributed` has no backend for MPS.
    if context.get_world_size() == 1 and torch.backends.mps.is_available():
        return [torch.device("mps")]
    return [torch.device("cpu")]


def cuda_indices(gpu_ids: Sequence[str], visible: str | None) -> list[int]:
    """Convert Ray's GPU ids to CUDA device indices, which are positions in CUDA_VISIBLE_DEVICES.

    Args:
        gpu_ids: Ray's ids: numbers, or UUIDs of GPUs or MIG slices.
        visible: Value of CUDA_VISIBLE_DEVICES; None if it is not set and all GPUs are visible.

    Raises:
        RuntimeError: A GPU of the worker is not visible to its process.
    """
    if visible is None:
        return [int(gpu_id) for gpu_id in gpu_ids]
    visible_ids = [gpu_id.strip() for gpu_id in visible.split(",")]
    hidden = [gpu_id for gpu_id in gpu_ids if gpu_id not in visible_ids]
    if hidden:
        raise RuntimeError(
            f"Ray assigned GPU {', '.join(hidden)} to this worker, but "
            f"CUDA_VISIBLE_DEVICES={visible!r} hides it. Do not set CUDA_VISIBLE_DEVICES; Ray sets "
            "it."
        )
    return [visible_ids.index(gpu_id) for gpu_id in gpu_ids]


def _require_cuda(gpu_ids: Sequence[str]) -> None:
    if torch.cuda.is_available():
        return
    cause = (
        "torch finds no usable CUDA driver"
        if torch.version.cuda or torch.version.hip
        else "it was built without CUDA; install a CUDA build from pytorch.org"
    )
    raise RuntimeError(
        f"Ray assigned GPU {', '.join(gpu_ids)} to this worker, but torch {torch.__version__} "
        f"cannot use it: {cause}. To train on CPUs, set ScalingConfig(use_gpu=False)."
    )
