"""Images, a small Lightning module, and runs that train it on several workers.

Nothing is random but the first weights and the order of the data, and both follow from a seed. The
batches of all ranks together are the same on any number of workers. So any two runs have the same
losses with any strategy if they have the right weights, optimizer state and data.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drawbar.lightning import (
    DrawbarLogger,
    RayDDPStrategy,
    RayModelParallelStrategy,
    prepare_trainer,
)
from drawbar.torch import TorchTrainer
from drawbar.train import (
    Checkpoint,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
    get_context,
)

SAMPLES = 240
BATCH = 24  # of all ranks together
STEPS = SAMPLES // BATCH  # per epoch
ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def digits(count: int) -> Dataset[Any]:
    """Images of ten kinds, labels, and the number of each image."""
    random = torch.Generator().manual_seed(0)
    kinds = torch.rand(10, 64, generator=random).round()
    labels = torch.arange(count) % 10
    noise = torch.rand(count, 64, generator=random)
    return TensorDataset((kinds[labels] + noise) / 2, labels, torch.arange(count))


def make_module(pl: Any, die_at: Sequence[int] = ()) -> Any:
    """Make a module of `lightning.pytorch` or `pytorch_lightning`.

    Before the steps `die_at`, one for each attempt, rank 1 is killed.
    """

    class Digits(pl.LightningModule):  # type: ignore[misc]  # one of two packages
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
            self.seen = list[int]()

        def configure_model(self) -> None:
            if isinstance(self.trainer.strategy, RayModelParallelStrategy):
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y, ids = batch
            context = get_context()
            dies = dict(enumerate(die_at)).get(context.get_attempt()) == self.global_step
            if dies and context.get_world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            self.seen += ids.tolist()
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y, _ = batch
            self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

        def train_dataloader(self) -> Any:
            return DataLoader(digits(SAMPLES), BATCH // self.trainer.world_size, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(digits(60), 10)

    return Digits()


def fit(
    folder: Path | str,
    callbacks: Callable[[Any], list[Any]],
    *,
    run: str = "run",
    num_workers: int = 2,
    package: str = "lightning",
    strategies: Sequence[Callable[[], Any]] = (RayDDPStrategy,),
    die_at: Sequence[int] = (),
    begin: Checkpoint | None = None,
    validation: Callable[[Checkpoint], dict[str, Any]] | None = None,
    fit_options: dict[str, Any] | None = None,
    after: Callable[[Any, Any], Any] = lambda trainer, module: module.seen,
    **options: Any,
) -> Result:
    """Train in a run.

    Args:
        callbacks: Creates the Trainer's callbacks from a package.
        strategies: Strategies that train separate modules one after the other.
        die_at: Before which step rank 1 is killed in each attempt, until one has none.
        begin: Checkpoint of another run to resume from.
        validation: Validates checkpoints during the run.
        after: Creates a rank's return value from its last Trainer and module.
        options: Arguments of the Trainer.
    """

    def make_trainer(pl: Any, strategy: Any) -> Any:
        return prepare_trainer(
            pl.Trainer(
                accelerator="cpu",
                strategy=strategy,
                callbacks=callbacks(pl),
                logger=DrawbarLogger(),
                log_every_n_steps=1,
                num_sanity_val_steps=0,
                enable_model_summary=False,
                **{"max_epochs": 3, "enable_progress_bar": False, **options},
            )
        )

    def function() -> Any:
        pl: Any = importlib.import_module(ROOTS[package])
        for strategy in strategies:
            trainer = make_trainer(pl, strategy())
            pl.seed_everything(1, verbose=False)
            module = make_module(pl, die_at)
            trainer.fit(module, **(fit_options or {}))
        return after(trainer, module)

    failures = FailureConfig(max_failures=len(die_at))
    return TorchTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name=run, storage_path=folder, failure_config=failures),
        resume_from_checkpoint=begin,
        validation_config=validation and ValidationConfig(validation),
    ).fit()


def losses(result: Result) -> dict[int, float]:
    """Return the loss of each step in a run's history, logged or reported with a checkpoint.

    Lightning logs a step after it has saved in it, so that a resumed run has this
    step only in the checkpoint's report, with the number of the next step.
    """
    manifests = [checkpoint.manifest for checkpoint, _ in result.best_checkpoints]
    saved = {each.index: each.metrics for each in manifests if each is not None}
    rows = result.metrics_dataframe.query("rank == 0").dropna(subset="loss")
    logged = rows[~rows["index"].isin(saved)]
    found = {int(each["step"]) - 1: each["loss"] for each in saved.values()}
    return found | dict(zip(logged["step"].astype(int), logged["loss"], strict=True))
