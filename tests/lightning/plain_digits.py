"""Plain Lightning on scikit-learn's digits, without Drawbar.

`torchrun --nproc-per-node=2 plain_digits.py 2 ddp model_parallel` prints the last loss of each
strategy. So does `python plain_digits.py 1 auto`, in one process with the batches of two together.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 48
STEPS = 20
QUIET: dict[str, Any] = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
}


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels from scikit-learn's file: importing it all would take half a second."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, np.float32, delimiter=","))
    return table[:, :-1] / 16, table[:, -1].long()


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            meshes: Any = self.device_mesh
            fully_shard(self.net, mesh=meshes["data_parallel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.net(x)
        return scores

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        correct = (self(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", correct, sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Any:
        return self(batch[0]).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class DigitsData(L.LightningDataModule):
    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.batch_size = GLOBAL_BATCH // num_workers

    def setup(self, stage: str) -> None:
        x, y = load_digits()
        self.train = TensorDataset(x[: GLOBAL_BATCH * STEPS], y[: GLOBAL_BATCH * STEPS])
        self.rest = TensorDataset(x[-480:], y[-480:])

    def train_dataloader(self) -> Any:
        alone = self.batch_size == GLOBAL_BATCH
        # Lightning shuffles for several processes with this sampler, and for one not at all.
        sampler: Any = DistributedSampler(self.train, 1, 0, seed=0) if alone else None
        return DataLoader(self.train, batch_size=self.batch_size, sampler=sampler)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rest, batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


def last_loss(strategy: Any, num_workers: int, **options: Any) -> float:
    """Train for `STEPS` steps; the loss of the last one."""
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=1,
        enable_checkpointing=False,
        **QUIET,
        **options,
    )
    trainer.fit(Digits(), DigitsData(num_workers))
    return trainer.callback_metrics["loss"].item()


if __name__ == "__main__":
    processes = int(sys.argv[1])
    for name in sys.argv[2:]:
        strategy = ModelParallelStrategy(processes, 1) if name == "model_parallel" else name
        loss = last_loss(strategy, processes, devices=processes)
        sys.stdout.write(f"{name} {loss}\n")  # in one piece: the processes share the output
        sys.stdout.flush()
