"""Tests of get_device and get_devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from drawbar.torch import TorchConfig, get_device, get_devices, prepare_model
from drawbar.train import Result, ScalingConfig, WorkerGroupError, get_context

without_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a torch that cannot use CUDA"
)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has MPS")
def test_get_device_without_gpus_returns_cpu(fit: Callable[..., Result]) -> None:
    assert fit(get_devices).return_value == [torch.device("cpu")]


def test_get_device_outside_training_function_raises() -> None:
    with pytest.raises(RuntimeError, match=r"^get_device\(\) works inside a training function"):
        get_device()
    with pytest.raises(RuntimeError, match=r"^prepare_model\(\) works inside a training function"):
        prepare_model(torch.nn.Linear(1, 1))


@pytest.mark.usefixtures("ray_cluster")
def test_workers_on_one_node_see_all_gpus(fit: Callable[..., Result]) -> None:
    def function() -> tuple[Any, ...]:
        ids = get_context().get_accelerator_ids()
        visible = os.environ["CUDA_VISIBLE_DEVICES"]
        return ids, visible, [visible.split(",").index(gpu_id) for gpu_id in ids]

    scaling = ScalingConfig(num_workers=2, use_gpu=True)
    result = fit(function, scaling_config=scaling, torch_config=TorchConfig(backend="gloo"))
    (ids_0, visible, index_0), (ids_1, visible_1, index_1) = result.return_values
    assert (index_0, index_1) == ([0], [1])
    assert visible == visible_1 == f"{ids_0[0]},{ids_1[0]}"


@without_cuda
@pytest.mark.usefixtures("ray_cluster")
def test_get_device_with_unusable_gpu_raises(fit: Callable[..., Result]) -> None:
    scaling = ScalingConfig(num_workers=1, use_gpu=True)
    with pytest.raises(
        WorkerGroupError, match=r"Ray assigned GPU \d to this worker, but torch .* can"
    ):
        fit(lambda: None, scaling_config=scaling)
