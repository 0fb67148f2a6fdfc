"""Tests of an `Accelerator` over NCCL that need CUDA devices."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from drawbar.accelerate import check_accelerator, launch
from drawbar.train import RunConfig, ScalingConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("ray_cluster"),
]
WORKERS = max(1, min(2, torch.cuda.device_count()))


@pytest.mark.parametrize("sharded", [False, True])
def test_accelerator_trains_over_nccl(digits: Any, run_config: RunConfig, sharded: bool) -> None:
    def function() -> Any:
        from accelerate import Accelerator
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
        accelerator = check_accelerator(Accelerator(fsdp_plugin=plugin))
        network = digits.network()
        model, optimizer, loader = accelerator.prepare(
            network, torch.optim.Adam(network.parameters()), digits.loader()
        )
        losses = [digits.step(accelerator, model, optimizer, x, y) for x, y in loader]
        return dist.get_backend(), accelerator.device.type, losses

    scaling = ScalingConfig(num_workers=WORKERS, use_gpu=True)
    result = launch(function, (), scaling, run_config=run_config)
    for backend, device, losses in result.return_values:
        assert (backend, device) == ("nccl", "cuda")
        assert losses[-1] < losses[0]
