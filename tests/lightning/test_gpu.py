"""Strategies over NCCL, on CUDA devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from drawbar.lightning import (
    RayDDPStrategy,
    RayDeepSpeedStrategy,
    RayFSDPStrategy,
    RayModelParallelStrategy,
    prepare_trainer,
)
from drawbar.torch import TorchTrainer
from drawbar.train import RunConfig, ScalingConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("ray_cluster"),
]
WORKERS = max(1, min(2, torch.cuda.device_count()))
STRATEGIES: dict[str, Any] = {
    "ddp": RayDDPStrategy,
    "fsdp": RayFSDPStrategy,
    "model_parallel": lambda **launch: RayModelParallelStrategy(
        data_parallel_size=WORKERS, **launch
    ),
    "zero_2": lambda **launch: RayDeepSpeedStrategy(stage=2, **launch),
    "zero_3": lambda **launch: RayDeepSpeedStrategy(stage=3, **launch),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_train_over_nccl(plain: Any, run_config: RunConfig, name: str) -> None:
    def function() -> tuple[str, str, float]:
        import lightning as L

        strategy = STRATEGIES[name]()
        trainer = L.Trainer(
            strategy=strategy, max_epochs=3, enable_checkpointing=False, **plain.QUIET
        )
        prepare_trainer(trainer).fit(plain.Digits(), plain.DigitsData(WORKERS))
        loss = trainer.callback_metrics["loss"].item()
        return dist.get_backend(), strategy.root_device.type, loss

    scaling = ScalingConfig(num_workers=WORKERS, use_gpu=True)
    run = TorchTrainer(function, scaling_config=scaling, run_config=run_config)
    for backend, device, loss in run.fit().return_values:
        assert (backend, device) == ("nccl", "cuda")
        assert loss < 1.0


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_launcher_returns_weights_to_driver(
    plain: Any, run_config: RunConfig, name: str, precision: Any
) -> None:
    import lightning as L

    if (name, precision) == ("model_parallel", "16-mixed"):
        precision = "bf16-mixed"  # ModelParallelStrategy takes no other mixed one
    strategy = STRATEGIES[name](num_workers=WORKERS, use_gpu=True, run_config=run_config)
    trainer = L.Trainer(
        strategy=strategy,
        max_epochs=3,
        precision=precision,
        enable_checkpointing=False,
        **plain.QUIET,
    )
    module = plain.Digits()
    trainer.fit(module, plain.DigitsData(WORKERS))
    data = plain.DigitsData(1)
    data.setup("fit")
    x, y = data.rest.tensors
    assert (module(x).argmax(1) == y).float().mean() > 0.6
