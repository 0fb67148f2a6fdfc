"""Lightning on scikit-learn's handwritten digits: an ordinary script, whose Trainer starts workers.

The plain script differs in one line: `strategy=`.
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar.lightning import RayDDPStrategy


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def training_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        accuracy = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class DigitsData(L.LightningDataModule):
    def setup(self, stage):
        images, labels = load_digits(return_X_y=True)
        images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
        parts = train_test_split(images, labels, test_size=0.2, random_state=0)
        x, x_test, y, y_test = (torch.from_numpy(part) for part in parts)
        self.train, self.test = TensorDataset(x, y), TensorDataset(x_test, y_test)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.test, batch_size=32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=RayDDPStrategy(num_workers=arguments.num_workers, use_gpu=arguments.use_gpu),
        max_epochs=arguments.epochs,
        callbacks=[ModelCheckpoint(monitor="accuracy", mode="max")],
        enable_progress_bar=False,
    )
    digits = Digits()
    trainer.fit(digits, DigitsData())
    print("accuracy:", trainer.callback_metrics["accuracy"].item())
    print("best checkpoint:", trainer.checkpoint_callback.best_model_path)
    image, label = load_digits(return_X_y=True)[0][0], load_digits(return_X_y=True)[1][0]
    pixels = torch.from_numpy(image.reshape(1, 1, 8, 8).astype("float32") / 16)
    print("the weights are here:", digits.net(pixels).argmax().item(), "is a", label)


if __name__ == "__main__":
    main()
