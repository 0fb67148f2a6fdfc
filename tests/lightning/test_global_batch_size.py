"""GlobalBatchSize: the loss curve does not depend on the number of workers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from drawbar.lightning import GlobalBatchSize, RayDDPStrategy, RayTrainReportCallback
from drawbar.torch import TorchTrainer
from drawbar.train import Result, RunConfig, ScalingConfig, WorkerGroupError
from drawbar.train.runs import find_run

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*:UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*logging interval"),
]

NUM_ROWS, EPOCH_STEPS = 204, 4  # the last 12 rows of an epoch are dropped
Rows = list[tuple[int, int]]


class NumberedRows(Dataset[Any]):
    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        self.x = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return row, self.x[row]


def make_module() -> Any:
    import lightning.pytorch as pl

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layers = torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
            self.layers = torch.nn.Sequential(*layers)
            self.rows = Rows()

        def loss(self, x: Any) -> Any:
            return (self.layers(x) - x.sum(1, keepdim=True)).square().mean()

        def training_step(self, batch: Any, index: int) -> Any:
            rows, x = batch
            self.rows += [(self.current_epoch, row) for row in rows.tolist()]
            return self.loss(x)

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_rows", float(len(batch[0])), on_epoch=True, reduce_fx="sum")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Net()


def train_steps(max_steps: int) -> Rows:
    """Train up to a step, report the loss of all rows after each step, and return the rows."""
    import lightning.pytorch as pl

    class LogLoss(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            with torch.no_grad():
                module.log("curve", module.loss(NumberedRows().x))

    module = make_module()
    trainer = pl.Trainer(
        max_steps=max_steps,
        callbacks=[
            LogLoss(),
            GlobalBatchSize(48, batch_size=4),
            RayTrainReportCallback(every_n_train_steps=1, every_n_epochs=None),
        ],
        strategy=RayDDPStrategy(),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    rows = NumberedRows()
    trainer.fit(module, DataLoader(rows, 4, shuffle=True, drop_last=True), DataLoader(rows, 4))
    assert trainer.global_step == max_steps
    rows_seen: Rows = module.rows
    return rows_seen


def run(path: Path, name: str, num_workers: int, max_steps: int) -> Result:
    return TorchTrainer(
        lambda: train_steps(max_steps),
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name=name, storage_path=path),
    ).fit()


@pytest.mark.nightly
def test_global_batch_size_keeps_loss_curve_with_other_numbers_of_workers(tmp_path: Path) -> None:
    run(tmp_path, "four", 4, 2 * EPOCH_STEPS)
    rows: Rows = []
    for num_workers, max_steps in ((4, 3), (3, 2 * EPOCH_STEPS)):  # within an epoch
        rows += itertools.chain(*run(tmp_path, "changed", num_workers, max_steps).return_values)
    expected, curve = (
        find_run(str(tmp_path / name)).get_curves()["curve"] for name in ("four", "changed")
    )
    assert len(expected) == 2 * EPOCH_STEPS
    assert curve == pytest.approx(expected, rel=1e-5)
    assert len(rows) == len(set(rows)) == 2 * EPOCH_STEPS * 48


@pytest.mark.parametrize(
    ("callback", "loader", "message"),
    [
        (
            lambda: GlobalBatchSize(48, 8),
            lambda: DataLoader(NumberedRows(), 4),
            "batch_size=4, but",
        ),
        (lambda: GlobalBatchSize(48, 4), lambda: DataLoader(NumberedRows(), 4), "drop_last=True"),
        (
            lambda: GlobalBatchSize(50, 4),
            lambda: DataLoader(NumberedRows(), 4),
            "multiple of batch",
        ),
        (
            lambda: GlobalBatchSize(48, 4),
            lambda: [DataLoader(NumberedRows(96), 4), DataLoader(NumberedRows(96), 4)],
            "needs one training DataLoader",
        ),
        (
            lambda: GlobalBatchSize(48, 4),
            lambda: DataLoader(NumberedRows(96), 4, sampler=list(range(96))),
            "without a custom sampler",
        ),
    ],
)
def test_global_batch_size_with_unsuitable_loader_raises(
    callback: Any, loader: Any, message: str, run_config: RunConfig
) -> None:
    def function() -> None:
        import lightning.pytorch as pl

        pl.Trainer(
            max_epochs=1,
            callbacks=[callback()],
            strategy=RayDDPStrategy(),
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        ).fit(make_module(), loader())

    with pytest.raises(WorkerGroupError, match=message):
        TorchTrainer(
            function, scaling_config=ScalingConfig(num_workers=0), run_config=run_config
        ).fit()


@pytest.mark.parametrize("value", [0, 1.5, True, None])
def test_global_batch_size_that_is_no_positive_integer_raises(value: Any) -> None:
    with pytest.raises(ValueError, match="global_batch_size must be a positive integer"):
        GlobalBatchSize(value, 4)
    with pytest.raises(ValueError, match=r"batch_size must be a positive integer"):
        GlobalBatchSize(48, value)
