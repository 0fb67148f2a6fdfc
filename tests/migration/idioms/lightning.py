"""Lightning's Trainer in a training function."""

import os

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import drawbar.train.lightning
from drawbar.train import ScalingConfig
from drawbar.train.torch import TorchTrainer


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_func() -> None:
    trainer = pl.Trainer(
        max_epochs=1,
        devices="auto",
        accelerator="cpu",
        strategy=drawbar.train.lightning.RayDDPStrategy(),
        plugins=[drawbar.train.lightning.RayLightningEnvironment()],
        callbacks=[drawbar.train.lightning.RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = drawbar.train.lightning.prepare_trainer(trainer)
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=4))


result = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=1)).fit()
assert result.checkpoint and result.metrics and result.metrics["epoch"] == 0
name = drawbar.train.lightning.RayTrainReportCallback.CHECKPOINT_NAME
assert os.path.exists(os.path.join(result.checkpoint.path, name))
