"""Which device a worker computes on: the one that Ray gave it, by torch's numbering."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from drawbar.train import get_context


def get_device() -> torch.device:
    """Give this worker's device; the first, if it has several GPUs. See `get_devices`."""
    return get_devices()[0]


def get_devices() -> list[torch.device]:
    """Give this worker's devices: the GPUs that Ray gave it; else MPS, on a Mac with one worker;
    else the CPU.

    A worker sees all GPUs that the run has on its node, so that the first of its own need not be
    `cuda:0`.

    Raises:
        RuntimeError: Called outside a training function, or Ray gave the worker GPUs that torch
            cannot use.
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
    """Say where Ray's GPU ids stand in CUDA_VISIBLE_DEVICES, which is how CUDA numbers them.

    Args:
        gpu_ids: Ray's ids: numbers, or the UUIDs of GPUs or MIG slices.
        visible: The value of CUDA_VISIBLE_DEVICES; None if it is not set: then all GPUs are
            visible.

    Raises:
        RuntimeError: A GPU of the worker is not visible to its process.
    """
    if visible is None:
        return [int(gpu_id) for gpu_id in gpu_ids]
    visible_ids = [each.strip() for each in visible.split(",")]
    hidden = [gpu_id for gpu_id in gpu_ids if gpu_id not in visible_ids]
    if hidden:
        raise RuntimeError(
            f"Ray gave this worker GPU {', '.join(hidden)}, which CUDA_VISIBLE_DEVICES={visible!r} "
            "hides; leave that variable to Ray"
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
        f"Ray gave this worker GPU {', '.join(gpu_ids)}, but torch {torch.__version__} cannot "
        f"use it: {cause}. To train on CPUs, set ScalingConfig(use_gpu=False)"
    )
