"""Ranks of a Lightning training are killed, and the others stay in `trainer.fit()`.

A disturbed and an undisturbed run use the same function. Each rank appends the samples of each step
and the names of its hooks to a file, and kills itself once at each of the requested points.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar.lightning import DrawbarLogger, RayDDPStrategy, RayTrainReportCallback
from drawbar.torch import TorchTrainer
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig, get_context, runs

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*:UserWarning:lightning.*"),
]

NUM_WORKERS = 3
NUM_SAMPLES = 48
BATCH_SIZE = 4
EPOCHS = 4
STEPS = NUM_SAMPLES // BATCH_SIZE // NUM_WORKERS


@dataclass(frozen=True)
class Kill:
    """Kill a rank once, after a number of optimizer steps, at a place."""

    rank: int
    step: int
    place: str


class Recorder:
    """Steps and hooks of a rank, in a file that outlives its process."""

    def __init__(self, directory: str, kills: tuple[Kill, ...]) -> None:
        self._directory = Path(directory)
        self._rank = get_context().get_world_rank()
        self._file = self._directory / f"rank_{self._rank}.jsonl"
        self._kills = [kill for kill in kills if kill.rank == self._rank]

    def record(self, **values: Any) -> None:
        with self._file.open("a") as file:
            print(json.dumps({"pid": os.getpid(), **values}), file=file)

    def die_at(self, place: str, step: int) -> None:
        for number, kill in enumerate(self._kills):
            marker = self._directory / f"killed_{self._rank}_{number}"
            if (kill.place, kill.step) == (place, step) and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)


class Net(pl.LightningModule):
    """Small network with buffers and dropout, whose ranks are killed at several places."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
        )
        weight: Any = next(self.parameters())
        weight.register_hook(lambda _: self.die_at("backward"))

    def die_at(self, place: str) -> None:
        self.recorder.die_at(place, self.global_step)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.die_at("forward")
        samples, x, y = batch
        self.samples = samples.tolist()
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("own_loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.recorder.record(
            hook="batch_end",
            samples=self.samples,
            place=[self.current_epoch, index, self.global_step],
        )
        self.die_at("batch_end")

    def on_train_epoch_start(self) -> None:
        self.recorder.record(hook="epoch_start", epoch=self.current_epoch)

    def on_train_epoch_end(self) -> None:
        self.die_at("epoch_end")
        own_loss = self.trainer.callback_metrics["own_loss"].item()
        self.recorder.record(hook="epoch_end", epoch=self.current_epoch, own_loss=own_loss)

    def validation_step(self, batch: Any, index: int) -> None:
        if not self.trainer.sanity_checking:
            self.die_at("validation")
        _, x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.recorder.record(hook="validation_end", epoch=self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


def make_loader(count: int, shuffle: bool) -> DataLoader[Any]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(torch.arange(count), x, x.sum(1, keepdim=True))
    return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=shuffle)


def train_func(config: dict[str, Any]) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = Net(Recorder(config["directory"], config["kills"]))
    checkpoint = ModelCheckpoint(monitor="val_loss", dirpath=config["directory"], save_top_k=2)
    stopping = EarlyStopping("val_loss", patience=10)
    callbacks: list[Any] = [checkpoint, stopping]
    if config["checkpoints"]:
        callbacks.append(RayTrainReportCallback())
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=RayDDPStrategy(),
        callbacks=callbacks,
        logger=DrawbarLogger(),
        log_every_n_steps=1,
        max_epochs=EPOCHS,
        enable_progress_bar=False,
        enable_model_summary=False,
        **config["options"],
    )
    trainer.fit(module, make_loader(NUM_SAMPLES, True), make_loader(12, False))
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "step": trainer.global_step,
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "stopping": stopping.state_dict(),
        "best_model_score": checkpoint.best_model_score,
        "best_model": Path(checkpoint.best_model_path).parts[-2:],
        "random": torch.rand(1).item(),
    }


@dataclass(frozen=True)
class Outcome:
    """Result of a run, and the records of its ranks.

    Attributes:
        result: The result.
        records: Records by rank.
    """

    result: Result
    records: list[list[dict[str, Any]]]

    @property
    def samples(self) -> Counter[int]:
        ends = [each for records in self.records for each in records if "samples" in each]
        return Counter(sample for each in ends for sample in each["samples"])

    def get_events(self, kind: str) -> list[dict[str, Any]]:
        events = runs.find_run(self.result.path).list_events()
        return [each for each in events if each["event"] == kind]


def run(
    path: Path, *kills: Kill, function: Any = train_func, checkpoints: bool = False, **options: Any
) -> Outcome:
    """Train, and return the outcome. `options` are arguments of the Trainer."""
    directory = path / "records"
    directory.mkdir(parents=True)
    config = {
        "directory": str(directory),
        "kills": kills,
        "checkpoints": checkpoints,
        "options": options,
    }
    failures = FailureConfig(max_failures=5, recovery="in_place")
    result = TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
        run_config=RunConfig(name="run", storage_path=path, failure_config=failures),
    ).fit()
    files = [directory / f"rank_{rank}.jsonl" for rank in range(NUM_WORKERS)]
    records = [list(map(json.loads, file.read_text().splitlines())) for file in files]
    return Outcome(result, records)


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, preload_transformers: None, ray_cluster: None
) -> Outcome:
    """Outcome of a run without deaths."""
    outcome = run(tmp_path_factory.mktemp("undisturbed"))
    assert outcome.samples == Counter(dict.fromkeys(range(NUM_SAMPLES), EPOCHS))
    assert outcome.get_events("recovered_in_place") == []
    return outcome


def assert_close(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(state) == list(expected)
    for name, value in expected.items():
        if isinstance(value, float | torch.Tensor):
            torch.testing.assert_close(state[name], value)
        elif isinstance(value, dict):
            assert_close(state[name], value)
        else:
            assert state[name] == value


def check_equal(outcome: Outcome, undisturbed: Outcome) -> None:
    """Check that a run has ended like the undisturbed one."""
    pairs = zip(outcome.result.return_values, undisturbed.result.return_values, strict=True)
    for rank, (value, expected) in enumerate(pairs):
        if rank > 0:  # DDP does not copy the last buffers
            for values in (value, expected):
                weights = values["weights"].items()
                values["weights"] = {name: each for name, each in weights if "running" not in name}
        assert_close(value, expected)


def check_hooks(outcome: Outcome, undisturbed: Outcome, dead: set[int]) -> None:
    """Check that the ranks that survive have run each hook once."""
    for rank, (records, expected) in enumerate(
        zip(outcome.records, undisturbed.records, strict=True)
    ):
        if rank not in dead:
            assert len({each["pid"] for each in records}) == 1
            for each, other in zip(records, expected, strict=True):
                own, others = ({**values, "pid": 0} for values in (each, other))
                assert own.pop("own_loss", 0) == pytest.approx(others.pop("own_loss", 0))
                assert own == others


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([Kill(1, 0, "forward")], id="first_batch"),
        pytest.param([Kill(1, STEPS + 1, "forward")], id="middle_of_epoch"),
        pytest.param([Kill(0, STEPS + 2, "backward")], id="backward_of_rank_0"),
        pytest.param([Kill(2, STEPS + 2, "batch_end")], id="batch_end"),
        pytest.param([Kill(1, 2 * STEPS, "batch_end")], id="last_batch_end"),
        pytest.param([Kill(1, 2 * STEPS, "epoch_end")], id="epoch_end"),
        pytest.param([Kill(2, 2 * STEPS, "validation")], id="validation"),
    ],
)
def test_in_place_recovery_equals_undisturbed_run(
    tmp_path: Path, undisturbed: Outcome, kills: list[Kill]
) -> None:
    outcome = run(tmp_path, *kills)
    recovered = outcome.get_events("recovered_in_place")
    assert [rank for event in recovered for rank in event["ranks"]] == [kill.rank for kill in kills]
    assert len(outcome.get_events("attempt_started")) == 1
    assert outcome.samples == undisturbed.samples
    check_equal(outcome, undisturbed)
    check_hooks(outcome, undisturbed, {kill.rank for kill in kills})
