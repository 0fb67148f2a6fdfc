"""A new process of a Lightning training receives states that only some programs have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.lightning.test_in_place_recovery import (
    NUM_SAMPLES,
    STEPS,
    Kill,
    Net,
    Recorder,
    assert_close,
    check_equal,
    make_loader,
    make_trainer,
    run,
)

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*:UserWarning:lightning.*"),
]


class NetWithMomentum(Net):
    """Module with a momentum encoder, which is updated in the forward pass."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.momentum_net = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        for average, param in zip(
            self.momentum_net.parameters(), self.net.parameters(), strict=True
        ):
            average.data = 0.9 * average.data + 0.1 * param.data
        return super().training_step(batch, index)


def test_in_place_recovery_of_momentum_encoder_equals_undisturbed_run(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "undisturbed", make_module=NetWithMomentum)
    outcome = run(tmp_path, Kill(0, STEPS + 1, "backward"), make_module=NetWithMomentum)
    assert [event["ranks"] for event in outcome.get_events("recovered_in_place")] == [[0]]
    check_equal(outcome, undisturbed)


class CountingScheduler:
    """Scheduler that does not belong to torch, and counts its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.count = 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.count)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class NetWithOwnScheduler(Net):
    """Module with a `CountingScheduler`."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": CountingScheduler(optimizer), "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: object) -> None:
        scheduler.step()


class CountingData(pl.LightningDataModule):
    """Data module that scales the batches by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def train_dataloader(self) -> DataLoader[Any]:
        return make_loader(NUM_SAMPLES, True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.count += 1
        samples, x, y = batch
        return samples, x * (1 + self.count / 100), y

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def train_with_own_states(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    pl.seed_everything(0, verbose=False)
    module = NetWithOwnScheduler(Recorder(config["directory"], config["kills"]))
    trainer = make_trainer([], max_epochs=2, val_check_interval=1.0)
    trainer.fit(module, datamodule=CountingData())
    return {name: value.clone() for name, value in module.named_parameters()}


def test_in_place_recovery_restores_data_module_and_own_scheduler(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "undisturbed", function=train_with_own_states)
    kill = Kill(1, STEPS + 1, "backward")
    outcome = run(tmp_path / "disturbed", kill, function=train_with_own_states)
    assert [event["ranks"] for event in outcome.get_events("recovered_in_place")] == [[1]]
    assert_close(outcome.result.return_values, undisturbed.result.return_values)
    log = Path(outcome.result.path, "logs", "rank_1.log").read_text()
    assert "has called NetWithOwnScheduler.on_train_epoch_start for epoch 0" in log
