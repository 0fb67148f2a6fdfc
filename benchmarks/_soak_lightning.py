"""Scenarios of Lightning in the soak test: one or several training loaders."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from drawbar.lightning import RayDDPStrategy, prepare_trainer

if TYPE_CHECKING:
    from benchmarks._soak_frameworks import Recorder

Mode = Literal["max_size", "max_size_cycle", "min_size"]
MODES: tuple[Mode, ...] = (
    "max_size",
    "max_size_cycle",
    "min_size",
)  # "sequential" is for evaluation alone


@dataclass(frozen=True)
class Loader:
    """A training data loader."""

    rows: int
    batch_size: int
    shuffle: bool
    drop_last: bool


@dataclass(frozen=True)
class LightningScenario:
    """A training with Lightning.

    Attributes:
        loaders: The training data loaders.
        mode: Mode of the `CombinedLoader`; None passes the only loader itself.
        is_dict: Whether the loaders are in a dict, otherwise in a list.
        epochs: Number of epochs.
        accumulate: Batches per optimizer step.
        save_every: Optimizer steps per checkpoint.
    """

    loaders: tuple[Loader, ...]
    mode: Mode | None
    is_dict: bool
    epochs: int
    accumulate: int
    save_every: int

    def train(self, recorder: Recorder) -> None:
        """Train, and record the rows and the weights."""
        pl.seed_everything(0)
        model = Model(recorder)
        trainer = prepare_trainer(
            pl.Trainer(
                strategy=RayDDPStrategy(),
                accelerator="cpu",
                max_epochs=self.epochs,
                accumulate_grad_batches=self.accumulate,
                callbacks=[ModelCheckpoint(every_n_train_steps=self.save_every)],
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
        )
        trainer.fit(model, self._make_loaders())
        recorder.weights = model.layer.weight.flatten().tolist()

    def _make_loaders(self) -> Any:
        loaders: list[DataLoader[Any]] = [
            DataLoader(
                TensorDataset(torch.arange(100.0 * number, 100.0 * number + each.rows)),
                batch_size=each.batch_size,
                shuffle=each.shuffle,
                drop_last=each.drop_last,
            )
            for number, each in enumerate(self.loaders)
        ]
        if self.mode is None:
            return loaders[0]
        named = {f"loader{number}": each for number, each in enumerate(loaders)}
        return CombinedLoader(named if self.is_dict else loaders, self.mode)


class Model(pl.LightningModule):
    """A linear layer that records its rows."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self._recorder = recorder

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Record the rows of all loaders and return the loss."""
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        parts = [parts] if isinstance(parts[0], torch.Tensor) else parts
        rows = [None if each is None else each[0].tolist() for each in parts]
        self._recorder.step(self.current_epoch, batch_idx, rows)
        columns = [each[0].reshape(-1, 1) / 100 for each in parts if each is not None]
        losses = [self.layer(each).square().mean() for each in columns]
        return torch.stack(losses).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum, whose steps depend on the earlier ones."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def draw(rng: random.Random) -> LightningScenario:
    """Draw a scenario."""
    loaders = tuple(
        Loader(
            rows=rng.randint(3, 12),
            batch_size=rng.randint(1, 3),
            shuffle=rng.random() < 0.7,
            drop_last=rng.random() < 0.3,
        )
        for _ in range(rng.randint(1, 3))
    )
    return LightningScenario(
        loaders=loaders,
        mode=rng.choice(MODES if len(loaders) > 1 else (None, *MODES)),
        is_dict=rng.random() < 0.5,
        epochs=rng.randint(1, 3),
        accumulate=rng.choice((1, 1, 2, 3)),
        save_every=rng.randint(1, 4),
    )
