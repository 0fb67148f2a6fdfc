"""Tests of drawbar.torch that need a CUDA device."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar.torch import (
    TorchConfig,
    accelerate,
    backward,
    get_device,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig, get_context

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
ONE_GPU = ScalingConfig(num_workers=1, use_gpu=True)
TWO_GPUS = ScalingConfig(num_workers=2, use_gpu=True)


@pytest.mark.usefixtures("ray_cluster")
def test_nccl_group_is_bound_to_worker_gpu(fit: Callable[..., Result]) -> None:
    def function() -> list[Any]:
        ones = torch.ones(1, device=get_device())
        dist.all_reduce(ones)
        return [dist.get_backend(), float(ones), torch.cuda.current_device() == ones.device.index]

    assert fit(function, scaling_config=ONE_GPU).return_value == ["nccl", 1.0, True]


@two_gpus
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_prepare_model_strategies_train_over_nccl(
    fit: Callable[..., Result], strategy: Any
) -> None:
    def function() -> Any:
        model = prepare_model(nn.Linear(8, 1), parallel_strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.ones(4, 8, device=get_device())
        for _ in range(50):
            optimizer.zero_grad()
            loss = (model(x) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    for loss in fit(function, scaling_config=TWO_GPUS).return_values:
        assert loss < 1e-3


@pytest.mark.usefixtures("ray_cluster")
def test_gloo_group_does_not_use_gpu(fit: Callable[..., Result]) -> None:
    def function() -> float:
        return float(torch.ones(1, device=get_device()))

    config = TorchConfig(backend="gloo")
    assert fit(function, scaling_config=ONE_GPU, torch_config=config).return_value == 1.0


@pytest.mark.usefixtures("ray_cluster")
def test_surviving_worker_frees_gpu_memory_of_old_attempt(
    fit: Callable[..., Result], run_config: RunConfig
) -> None:
    def function() -> tuple[int, bool]:
        context, found = get_context(), torch.cuda.memory_allocated()
        model = prepare_model(nn.Linear(4096, 4096))
        dist.barrier()
        if context.get_attempt() == 0:
            context.cache["kept"] = True
            if context.get_world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(1, 4096, device=get_device())).sum().backward()
        return found, "kept" in context.cache

    result = fit(
        function,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.5}
        ),
        run_config=replace(run_config, failure_config=FailureConfig(max_failures=1)),
    )
    assert result.return_values == [(0, True), (0, False)]


@pytest.mark.usefixtures("ray_cluster")
def test_prefetched_batches_equal_loader_batches(fit: Callable[..., Result]) -> None:
    def function() -> float:
        data = TensorDataset(torch.arange(4096.0).repeat(1000, 1).T.contiguous())
        loader: Any = prepare_data_loader(DataLoader(data, 64, pin_memory=True))
        worst = 0.0
        for number, (batch,) in enumerate(loader):
            heavy = batch @ batch.T.contiguous()  # work that the next copy overlaps with
            expected = torch.arange(64.0, device=batch.device) + 64 * number
            worst = max(
                worst, float((batch[:, 0] - expected).abs().max()), float(heavy.isnan().any())
            )
        return worst

    assert fit(function, scaling_config=ONE_GPU).return_value == 0.0


@pytest.mark.usefixtures("ray_cluster")
def test_mixed_precision_scales_gradients(fit: Callable[..., Result]) -> None:
    def function() -> list[Any]:
        accelerate(amp=True)
        model = prepare_model(nn.Linear(8, 1))
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        x = torch.ones(4, 8, device=get_device())
        for _ in range(100):
            optimizer.zero_grad()
            loss = (model(x) - 1).pow(2).mean()
            backward(loss)
            optimizer.step()
        return [type(optimizer).__name__, loss.item() < 1e-2]

    assert fit(function, scaling_config=ONE_GPU).return_value == ["ScaledOptimizer", True]
