"""Tests of the Trainer that need CUDA devices: NCCL with replicated and sharded models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from drawbar.torch import TorchTrainer
from drawbar.train import RunConfig, ScalingConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("ray_cluster"),
]
WORKERS = max(1, min(2, torch.cuda.device_count()))


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "zero2", "zero3"])
def test_trainer_resumes_over_nccl(
    tiny: Any, runs: Any, tmp_path: Path, run_config: RunConfig, kind: str
) -> None:
    def fit(begin: str | None = None) -> Any:
        def function() -> Any:
            sharding = tiny.SHARDED.get(kind, {})
            saves = {"save_strategy": "steps", "save_steps": 10}
            trainer = tiny.trainer(tmp_path / "output", use_cpu=False, **sharding, **saves)
            runs.on_ray(trainer).train(resume_from_checkpoint=begin)
            return dist.get_backend(), trainer.args.device.type, tiny.losses(trainer)

        scaling = ScalingConfig(num_workers=WORKERS, use_gpu=True)
        return TorchTrainer(function, scaling_config=scaling, run_config=run_config).fit()

    first = fit()
    for backend, device, losses in first.return_values:
        assert (backend, device) == ("nccl", "cuda")
        assert losses[20] < losses[1]
    again = fit(begin=first.best_checkpoints[0][0].path)  # the one of step 10
    assert again.return_value[2] == pytest.approx(first.return_value[2], rel=1e-2)
