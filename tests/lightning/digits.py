"""scikit-learn's digits, a small Lightning module, and runs that train it on a group of workers.

Nothing is random but the first weights and the order of the data, and both follow from a seed. So
two runs that see the same batches have the same losses.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drawbar.lightning import JournalLogger, RayDDPStrategy, prepare_trainer
from drawbar.torch import TorchTrainer
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig, get_context

SAMPLES = 320
BATCH = 16
ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def digits(count: int = SAMPLES) -> Dataset[Any]:
    """Images, labels, and the number of each image."""
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images[:count].astype("float32") / 16)
    return TensorDataset(x, torch.from_numpy(labels[:count]), torch.arange(count))


def make_module(pl: Any, die_at: int | None = None) -> Any:
    """Make a module of a package.

    Logs as `ids` a number with a bit for each sample of the batch, so that a sum over batches tells
    which samples were seen how often.

    Args:
        pl: `lightning.pytorch` or `pytorch_lightning`.
        die_at: The global step before which rank 1 is killed, in the first attempt.
    """

    class Digits(pl.LightningModule):  # type: ignore[misc]  # one of two packages
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
            self.seen = list[int]()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y, ids = batch
            context = get_context()
            if (self.global_step, context.get_world_rank(), context.get_attempt()) == (
                die_at,
                1,
                0,
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            self.seen += ids.tolist()
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, sync_dist=True)
            self.log("ids", float(ids.sum()))
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y, _ = batch
            self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

        def train_dataloader(self) -> Any:
            return DataLoader(digits(), BATCH, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(digits(64), 32)

    return Digits()


def fit(
    folder: Path,
    callbacks: Callable[[Any], list[Any]],
    *,
    package: str = "lightning",
    num_workers: int = 2,
    die_at: int | None = None,
    after: Callable[[Any, Any], Any] = lambda trainer, module: module.seen,
    run: str = "run",
    **trainer_options: Any,
) -> Result:
    """Train in a run; `callbacks` makes them from a package, `after` gives what ranks return."""

    def function() -> Any:
        pl: Any = importlib.import_module(ROOTS[package])
        pl.seed_everything(1, verbose=False)
        options = {"max_epochs": 3, "log_every_n_steps": 1, "accelerator": "cpu"}
        trainer = pl.Trainer(
            strategy=RayDDPStrategy(),
            callbacks=callbacks(pl),
            logger=JournalLogger(),
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **{**options, **trainer_options},
        )
        trainer = prepare_trainer(trainer)
        module = make_module(pl, die_at)
        trainer.fit(module)
        return after(trainer, module)

    failures = FailureConfig(max_failures=0 if die_at is None else 1)
    return TorchTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name=run, storage_path=folder, failure_config=failures),
    ).fit()
