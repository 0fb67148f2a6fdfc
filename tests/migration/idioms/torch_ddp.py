"""DDP with a sampler, and a checkpoint that rank 0 saves into a temporary directory."""

import os
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drawbar.train
from drawbar.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from drawbar.train.torch import TorchTrainer, prepare_data_loader, prepare_model


def train_func(config: dict[str, Any]) -> None:
    x = torch.arange(32.0).reshape(-1, 1) / 32
    loader = DataLoader(TensorDataset(x, 2 * x), batch_size=config["batch_size"], shuffle=True)
    loader = prepare_data_loader(loader)
    model = prepare_model(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        if drawbar.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for features, labels in loader:
            loss = nn.functional.mse_loss(model(features), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if drawbar.train.get_context().get_world_rank() == 0:
                weights = model.module.state_dict()  # type: ignore[union-attr]
                torch.save(weights, os.path.join(folder, "model.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            drawbar.train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=checkpoint)


result = TorchTrainer(
    train_func,
    train_loop_config={"batch_size": 4},
    scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
    run_config=RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=1)),
).fit()
assert result.checkpoint and result.metrics and result.metrics["epoch"] == 1
with result.checkpoint.as_directory() as folder:
    assert "weight" in torch.load(os.path.join(folder, "model.pt"))
