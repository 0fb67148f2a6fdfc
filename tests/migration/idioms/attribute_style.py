"""Integrations as attributes of the package."""

from typing import Any

import torch

from drawbar import train


def train_func(config: dict[str, Any]) -> None:
    model = train.torch.prepare_model(torch.nn.Linear(1, 1))
    assert train.torch.get_device().type == "cpu"
    train.report({"weights": sum(p.numel() for p in model.parameters())})


trainer = train.torch.TorchTrainer(train_func, scaling_config=train.ScalingConfig(num_workers=1))
assert trainer.fit().metrics == {"weights": 2}
