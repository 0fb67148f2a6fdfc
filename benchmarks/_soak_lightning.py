"""Random scenarios of Lightning: several training loaders, accumulation, and ways to save."""

from __future__ import annotations

import logging
import random
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._soak_restarts import Steps
from drawbar.lightning import RayDDPStrategy

MODES = ("max_size", "max_size_cycle", "min_size")  # "sequential" is for evaluation only


def draw(rng: random.Random) -> dict[str, Any]:
    """Return the settings of a random scenario."""
    loaders = [
        {
            "rows": rng.randint(3, 12),
            "batch_size": rng.randint(1, 3),
            "shuffle": rng.random() < 0.7,
            "drop_last": rng.random() < 0.3,
            "num_workers": rng.choices((0, 1), weights=(19, 1))[0],
        }
        for _ in range(rng.randint(1, 3))
    ]
    saves_every_batch = rng.random() < 0.3
    return {
        "loaders": loaders,
        "mode": rng.choice(MODES if len(loaders) > 1 else (None, *MODES)),
        "is_dict": rng.random() < 0.5,
        "epochs": rng.randint(1, 3),
        "accumulate": rng.choice((1, 1, 2, 3)),
        "save_every": None if saves_every_batch else rng.randint(1, 4),
        "ranks": rng.choices((1, 2), weights=(11, 1))[0],
    }


class Model(pl.LightningModule):
    """A linear layer that adds the steps of a Trainer, and fails where it is planned.

    Args:
        steps: Steps of the attempt.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self._steps = steps

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Add the rows of all loaders and return the loss."""
        self._steps.stop_if_planned()
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        parts = [parts] if isinstance(parts[0], torch.Tensor) else parts
        rows = [None if each is None else each[0].tolist() for each in parts]
        columns = [each[0].reshape(-1, 1) / 100 for each in parts if each is not None]
        loss = torch.stack([self.layer(each).square().mean() for each in columns]).mean()
        self._steps.add((self.current_epoch, batch_idx), (rows, loss.item()))
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Count the steps as saved, without batches after the last step of the optimizer."""
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        window = self.trainer.accumulate_grad_batches
        rest = 0 if progress.is_last_batch else progress.current.processed % window
        self._steps.save(rest)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum, whose steps depend on the earlier ones."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def train(settings: dict[str, Any], steps: Steps) -> list[float]:
    """Train, and return the weights."""
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    pl.seed_everything(0)
    model = Model(steps)
    save_every = settings["save_every"]
    # Time intervals end between the steps of the optimizer, too.
    interval = timedelta(microseconds=1) if save_every is None else None
    trainer = pl.Trainer(
        strategy=RayDDPStrategy(),
        accelerator="cpu",
        max_epochs=settings["epochs"],
        accumulate_grad_batches=settings["accumulate"],
        callbacks=[ModelCheckpoint(every_n_train_steps=save_every, train_time_interval=interval)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, _make_loaders(settings))
    return [each.item() for each in model.parameters()]


def _make_loaders(settings: dict[str, Any]) -> Any:
    loaders = []
    for number, options in enumerate(settings["loaders"]):
        rows = torch.arange(100.0 * number, 100.0 * number + options["rows"])
        others = {name: value for name, value in options.items() if name != "rows"}
        loaders.append(DataLoader(TensorDataset(rows), **others))
    if settings["mode"] is None:
        return loaders[0]
    named = {f"loader{number}": each for number, each in enumerate(loaders)}
    return CombinedLoader(named if settings["is_dict"] else loaders, settings["mode"])
