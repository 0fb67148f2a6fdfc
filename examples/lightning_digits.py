"""A Lightning Trainer on scikit-learn's handwritten digits, on several workers.

Stop it and run it again, or run it with more --epochs: it resumes from the latest checkpoint.
"""

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar.lightning import DrawbarLogger, RayDDPStrategy
from drawbar.torch import TorchTrainer
from drawbar.train import RunConfig, ScalingConfig
from drawbar.train.runs import get_default_storage_path


class Digits(pl.LightningDataModule):
    def setup(self, stage):
        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
        parts = train_test_split(images, labels, test_size=0.2, random_state=0)
        x, x_test, y, y_test = (torch.from_numpy(part) for part in parts)
        self.training, self.test = TensorDataset(x, y), TensorDataset(x_test, y_test)

    def train_dataloader(self):
        return DataLoader(self.training, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.test, batch_size=64)


class Classifier(pl.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        accuracy = (self.net(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def train_loop(config):
    pl.seed_everything(0, verbose=False)
    best = pl.callbacks.ModelCheckpoint(monitor="accuracy", mode="max", save_last=True)
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        strategy=RayDDPStrategy(),  # a plain script does not have this line
        callbacks=[best],
        logger=DrawbarLogger(),
        log_every_n_steps=10,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(lr=0.002), Digits())
    return best.best_model_path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("num-workers", 2), ("epochs", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--storage-path", default=get_default_storage_path())
    args = parser.parse_args()
    result = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=args.num_workers),
        run_config=RunConfig(name="lightning-digits", storage_path=args.storage_path),
    ).fit()
    best = Classifier.load_from_checkpoint(result.return_value)
    for checkpoint, metrics in result.best_checkpoints:
        print(f"{checkpoint}: accuracy {metrics['accuracy']:.3f}")
    print(f"the best is in {result.return_value}")
