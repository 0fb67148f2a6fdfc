"""Ray Data shards as data loaders of Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import ray.data
import torch

from drawbar import train
from drawbar.lightning import RayDDPStrategy, RayTrainReportCallback, prepare_trainer
from drawbar.torch import TorchTrainer
from drawbar.train import FailureConfig, RunConfig, ScalingConfig


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch["x"]).square().mean()
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("validated", float(self.current_epoch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FailsOnce(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1 and train.get_context().get_attempt() == 0:
            raise RuntimeError("once")


def make_trainer(callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    strategy: Any = RayDDPStrategy()
    return prepare_trainer(
        L.Trainer(
            max_epochs=2,
            accelerator="cpu",
            strategy=strategy,
            callbacks=callbacks,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            logger=False,
            **options,
        )
    )


def function() -> int:
    trainer = make_trainer([RayTrainReportCallback(), FailsOnce()])
    batches = train.get_dataset_shard("train").iter_torch_batches(batch_size=2)
    held_out = train.get_dataset_shard("valid").iter_torch_batches(batch_size=2)
    trainer.fit(Line(), batches, held_out)
    return int(trainer.global_step)


class WithoutLength:
    """A user's iterable. Lightning reads one batch ahead, because it does not know the length."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Recorder(Line):
    """Records the rows that it has trained, in the checkpoint too."""

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self.fail_at = fail_at
        self.trained: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        if len(self.trained) == 2 * self.fail_at and train.get_context().get_attempt() == 0:
            raise RuntimeError("once")
        self.trained += batch["row"].tolist()
        loss: torch.Tensor = self.layer(batch["row"].float().reshape(-1, 1)).square().mean()
        return loss * 0.0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["trained"] = self.trained

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.trained = checkpoint["trained"]


class SaveEachStep(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        step = trainer.global_step
        trainer.save_checkpoint(Path(train.get_context().get_storage(), f"s{step}/checkpoint.ckpt"))


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings("ignore")  # Lightning's, of few workers and no logger
@pytest.mark.parametrize(
    ("num_workers", "fail_at", "has_validation"), [(0, 1, False), (1, 3, True), (0, 6, True)]
)
def test_loader_without_length_trains_each_row_once(
    run_config: RunConfig, num_workers: int, fail_at: int, has_validation: bool
) -> None:
    def function() -> list[int]:
        trainer = make_trainer([SaveEachStep()], val_check_interval=1 if has_validation else None)
        batches = train.get_dataset_shard("train").iter_torch_batches(batch_size=2)
        valid = train.get_dataset_shard("valid").iter_torch_batches(batch_size=2)
        model = Recorder(fail_at)
        trainer.fit(model, WithoutLength(batches), valid if has_validation else None)
        return model.trained

    rows = ray.data.from_items([{"row": row} for row in range(8)]).materialize()
    held_out = ray.data.from_items([{"x": np.ones(1, np.float32)}] * 4).materialize()
    result = TorchTrainer(
        function,
        datasets={"train": rows, "valid": held_out},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=replace(run_config, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    assert result.return_value == [*range(8), *range(8)]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings("ignore")  # Lightning's, of few workers and no logger
def test_resume_with_ray_data_continues_with_next_epoch(run_config: RunConfig) -> None:
    rows = ray.data.from_items([{"x": np.ones(1, np.float32)}] * 4).materialize()
    result = TorchTrainer(
        function,
        datasets={"train": rows, "valid": rows},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=replace(run_config, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    assert result.return_value == 4
    assert result.metrics is not None
    assert result.metrics["validated"] == 1
