"""Ranks of a Lightning training are killed, and the others stay in `trainer.fit()`.

A disturbed and an undisturbed run use the same function. Each rank appends the samples of each step
and the names of its hooks to a file, and kills itself once at each of the requested points.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from drawbar.lightning import (
    DrawbarLogger,
    RayDDPStrategy,
    RayFSDPStrategy,
    RayTrainReportCallback,
)
from drawbar.torch import TorchTrainer
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig, get_context, runs

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*:UserWarning:lightning.*"),
]

NUM_WORKERS = 3
NUM_SAMPLES = 48
BATCH_SIZE = 4
STEPS = NUM_SAMPLES // BATCH_SIZE // NUM_WORKERS
EPOCHS = 3  # then, `EarlyStopping` ends the training
IN_PLACE = FailureConfig(max_failures=5, recovery="in_place")


@dataclass(frozen=True)
class Kill:
    """Kill a rank once, after a number of optimizer steps, at a place."""

    rank: int
    step: int
    place: str

    @property
    def epoch(self) -> int:
        return (self.step if self.place in ("forward", "backward") else self.step - 1) // STEPS


class Recorder:
    """Steps and hooks of a rank, in a file that outlives its process."""

    def __init__(self, directory: str, kills: tuple[Kill, ...]) -> None:
        self._directory = Path(directory)
        self._kills = kills

    @property
    def _rank(self) -> int:
        return get_context().get_world_rank()

    def record(self, hook: str, epoch: int, **values: Any) -> None:
        record = {"hook": hook, "epoch": epoch, "pid": os.getpid(), **values}
        with (self._directory / f"rank_{self._rank}.jsonl").open("a") as file:
            print(json.dumps(record), file=file)

    def die_at(self, place: str, step: int) -> None:
        for number, kill in enumerate(self._kills):
            marker = self._directory / f"killed_{number}"
            if kill == Kill(self._rank, step, place) and not marker.exists():
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
        self.mean_loss = MeanMetric()
        weight: Any = next(self.parameters())
        weight.register_hook(lambda _: self.die_at("backward"))

    def die_at(self, place: str) -> None:
        if not self.trainer.sanity_checking:
            self.recorder.die_at(place, self.global_step)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.die_at("forward")
        self.die_at(f"batch_{index}")
        samples, x, y = batch
        self.samples = samples.tolist()
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("own_loss", loss, on_step=False, on_epoch=True)
        self.mean_loss(loss)
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        self.log("until_stop", max(1.0 - self.current_epoch, 0.0), on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        step, epoch = self.global_step, self.current_epoch
        self.recorder.record("batch_end", epoch, samples=self.samples, index=index, step=step)
        self.die_at("batch_end")

    def on_train_epoch_start(self) -> None:
        self.recorder.record("epoch_start", self.current_epoch)

    def on_train_epoch_end(self) -> None:
        self.die_at("epoch_end")
        metrics = self.trainer.callback_metrics
        names = {"loss", "own_loss", "mean_loss"} & metrics.keys()  # a resumed epoch has none
        losses = {name: metrics[name].item() for name in sorted(names)}
        self.recorder.record("epoch_end", self.current_epoch, losses=losses)

    def validation_step(self, batch: Any, index: int) -> None:
        self.die_at("validation")
        _, x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.recorder.record("validation_end", self.current_epoch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.die_at("checkpoint")

    def on_fit_start(self) -> None:
        self.die_at("fit_start")

    def on_fit_end(self) -> None:
        self.die_at("fit_end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [
            {"scheduler": plateau, "monitor": "val_loss"},
            {"scheduler": decay, "interval": "step"},
        ]


def make_loader(count: int, shuffle: bool, num_workers: int = 0) -> DataLoader[Any]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(torch.arange(count), x, x.sum(1, keepdim=True))
    return DataLoader(dataset, BATCH_SIZE, shuffle=shuffle, num_workers=num_workers)


def make_trainer(callbacks: list[Any], **options: Any) -> pl.Trainer:
    defaults: Any = {
        "accelerator": "cpu",
        "strategy": RayDDPStrategy(),
        "logger": DrawbarLogger(),
        "log_every_n_steps": 1,
        "max_epochs": 8,
        "val_check_interval": 0.5,
        "num_sanity_val_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=callbacks, **{**defaults, **options})


def train_func(config: dict[str, Any]) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = config["make_module"](Recorder(config["directory"], config["kills"]))
    checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=2)
    stopping = EarlyStopping("until_stop", patience=1, strict=False, check_on_train_epoch_end=True)
    trainer = make_trainer([checkpoint, stopping, *config["callbacks"]], **config["options"])
    loader = make_loader(NUM_SAMPLES, True, config["loader_workers"])
    trainer.fit(module, loader, make_loader(12, False))
    schedulers = {
        type(each.scheduler).__name__: each.scheduler.state_dict()
        for each in trainer.lr_scheduler_configs
    }
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "schedulers": schedulers,
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

    @property
    def reports(self) -> list[list[int]]:
        """Optimizer steps of the reports, by rank."""
        frame = self.result.metrics_dataframe
        return [frame[frame["rank"] == rank]["step"].tolist() for rank in range(NUM_WORKERS)]

    def get_events(self, kind: str) -> list[dict[str, Any]]:
        events = runs.find_run(self.result.path).list_events()
        return [each for each in events if each["event"] == kind]


def run(
    path: Path,
    *kills: Kill,
    function: Any = train_func,
    make_module: Any = Net,
    callbacks: Any = (),
    loader_workers: int = 0,
    **options: Any,
) -> Outcome:
    """Train, and return the outcome. `options` are arguments of the Trainer."""
    directory = path / "records"
    directory.mkdir(parents=True)
    config = {
        "directory": str(directory),
        "kills": kills,
        "make_module": make_module,
        "callbacks": callbacks,
        "loader_workers": loader_workers,
        "options": options,
    }
    result = TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
        run_config=RunConfig(name="run", storage_path=path, failure_config=IN_PLACE),
    ).fit()
    files = sorted(directory.glob("rank_*.jsonl"))
    return Outcome(result, [list(map(json.loads, file.read_text().splitlines())) for file in files])


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, preload_transformers: None, ray_cluster: None
) -> Outcome:
    """Outcome of a run without deaths."""
    outcome = run(tmp_path_factory.mktemp("undisturbed"))
    assert outcome.samples == Counter(dict.fromkeys(range(NUM_SAMPLES), EPOCHS))
    assert outcome.get_events("recovered_in_place") == []
    return outcome


def assert_close(value: Any, expected: Any) -> None:
    if isinstance(expected, float | torch.Tensor):
        torch.testing.assert_close(value, expected)
    elif isinstance(expected, dict):
        assert list(value) == list(expected)
        for name in expected:
            assert_close(value[name], expected[name])
    elif isinstance(expected, list):
        assert len(value) == len(expected)
        for each, other in zip(value, expected, strict=True):
            assert_close(each, other)
    else:
        assert value == expected


def check_equal(outcome: Outcome, undisturbed: Outcome) -> None:
    """Check that a run has ended like the undisturbed one."""
    assert outcome.samples == undisturbed.samples
    pairs = zip(outcome.result.return_values, undisturbed.result.return_values, strict=True)
    for rank, (value, expected) in enumerate(pairs):
        if rank > 0:  # DDP does not copy the last buffers
            for values in (value, expected):
                weights = values["weights"].items()
                values["weights"] = {name: each for name, each in weights if "running" not in name}
        assert_close(value, expected)


def check_survivors(outcome: Outcome, undisturbed: Outcome, kills: list[Kill]) -> None:
    """Check that the ranks that survive have run each hook once, and made each report once."""
    frames = [each.result.metrics_dataframe for each in (outcome, undisturbed)]
    for rank in set(range(NUM_WORKERS)) - {kill.rank for kill in kills}:
        records, expected = outcome.records[rank], undisturbed.records[rank]
        assert len({each["pid"] for each in records}) == 1
        for record, other in zip(records, expected, strict=True):
            changed = {"pid"}
            if record["epoch"] in {kill.epoch for kill in kills}:
                changed.add("losses")  # a mean of all batches of the epoch
            own, others = (
                {name: value for name, value in each.items() if name not in changed}
                for each in (record, other)
            )
            assert_close(own, others)
        reports, others = (frame[frame["rank"] == rank] for frame in frames)
        assert len(reports) == len(others)


DEATHS = {
    "first_batch": [Kill(1, 0, "forward")],
    "middle_of_epoch": [Kill(1, STEPS + 1, "forward")],
    "backward_of_rank_0": [Kill(0, STEPS + 2, "backward")],
    "batch_end": [Kill(2, STEPS + 1, "batch_end")],
    "last_batch_end": [Kill(1, 2 * STEPS, "batch_end")],
    "validation": [Kill(0, STEPS + 2, "validation")],
    "validation_at_epoch_end": [Kill(2, 2 * STEPS, "validation")],
    "before_checkpoint": [Kill(0, STEPS, "checkpoint")],
    "epoch_end": [Kill(1, STEPS, "epoch_end")],
    "last_epoch_end": [Kill(1, EPOCHS * STEPS, "epoch_end")],
    "two_at_once": [Kill(1, 3, "backward"), Kill(2, 3, "backward")],
    "one_by_one": [
        Kill(1, 2, "forward"),
        Kill(1, STEPS, "validation"),
        Kill(0, STEPS + 3, "backward"),
    ],
}
IN_EACH_TEST_RUN = ("batch_end", "epoch_end")


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(kills, id=name, marks=() if name in IN_EACH_TEST_RUN else pytest.mark.nightly)
        for name, kills in DEATHS.items()
    ],
)
def test_in_place_recovery_equals_undisturbed_run(
    tmp_path: Path, undisturbed: Outcome, kills: list[Kill]
) -> None:
    outcome = run(tmp_path, *kills)
    recovered = outcome.get_events("recovered_in_place")
    assert sum(len(event["ranks"]) for event in recovered) == len(kills)
    assert len(outcome.get_events("attempt_started")) == 1
    check_equal(outcome, undisturbed)
    check_survivors(outcome, undisturbed, kills)


@pytest.mark.nightly
def test_in_place_recovery_of_trainer_in_driver_equals_undisturbed_run(
    tmp_path: Path, undisturbed: Outcome
) -> None:
    pl.seed_everything(0, verbose=False)
    module = Net(Recorder(str(tmp_path), (Kill(1, STEPS + 1, "forward"),)))
    run_config = RunConfig(name="run", storage_path=tmp_path, failure_config=IN_PLACE)
    stopping = EarlyStopping("until_stop", patience=1, check_on_train_epoch_end=True)
    strategy = RayDDPStrategy(num_workers=NUM_WORKERS, run_config=run_config)
    trainer = make_trainer([stopping], strategy=strategy, logger=False)
    trainer.fit(module, make_loader(NUM_SAMPLES, True), make_loader(12, False))
    events = runs.find_run(str(tmp_path / "run")).list_events()
    assert [each["ranks"] for each in events if each["event"] == "recovered_in_place"] == [[1]]
    assert_close(dict(module.state_dict()), undisturbed.result.return_values[0]["weights"])


@pytest.mark.nightly
def test_in_place_recovery_during_gradient_accumulation_equals_undisturbed_run(
    tmp_path: Path,
) -> None:
    reports = RayTrainReportCallback(every_n_train_steps=1, save_checkpoints=False)
    options: Any = {
        "accumulate_grad_batches": 2,
        "loader_workers": 1,
        "callbacks": [reports],
        "logger": False,
    }
    undisturbed = run(tmp_path / "undisturbed", **options)
    kills = [Kill(1, 2, "batch_1"), Kill(2, 5, "batch_2")]
    outcome = run(tmp_path / "disturbed", *kills, **options)
    assert len(outcome.get_events("recovered_in_place")) == len(kills)
    assert_close(outcome.result.return_values[0], undisturbed.result.return_values[0])
    for values, expected in zip(outcome.reports, undisturbed.reports, strict=True):
        assert values == expected


def test_in_place_recovery_saves_the_same_checkpoints_on_all_ranks(tmp_path: Path) -> None:
    callbacks = [
        # It saves after the validation of its step.
        ModelCheckpoint(
            monitor="val_loss", every_n_train_steps=STEPS, save_top_k=-1, filename="steps-{step}"
        ),
        # It saves nothing in the last epoch, nor at the end of `fit`.
        ModelCheckpoint(every_n_epochs=2, save_top_k=-1, save_last=True, filename="epochs-{step}"),
    ]
    undisturbed = run(tmp_path / "undisturbed", callbacks=callbacks)
    kills = [Kill(1, STEPS, "batch_end"), Kill(2, 2 * STEPS + 1, "forward")]
    outcome = run(tmp_path / "disturbed", *kills, callbacks=callbacks)
    assert len(outcome.get_events("recovered_in_place")) == len(kills)
    committed, expected = (
        [event["name"] for event in each.get_events("checkpoint")]
        for each in (outcome, undisturbed)
    )
    assert committed == expected


class NetWithBarrier(Net):
    """Module whose ranks wait for each other between a step and the end of its batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        super().on_train_batch_end(outputs, batch, index)
        self.trainer.strategy.barrier()


class NetWithOwnCollective(Net):
    """Module that uses the default process group."""

    def on_train_start(self) -> None:
        dist.barrier()


class NetThatChangesWeights(Net):
    """Module whose weights are others during a validation."""

    def on_validation_start(self) -> None:
        for param in self.parameters():
            param.data *= 0.5

    def on_validation_end(self) -> None:
        for param in self.parameters():
            param.data *= 2


@pytest.mark.parametrize(
    ("make_module", "kill", "notice"),
    [
        (NetWithBarrier, Kill(1, STEPS + 3, "batch_end"), "not between an optimizer step and"),
        pytest.param(
            NetThatChangesWeights,
            Kill(2, STEPS, "validation"),
            "code after the batch, or before its backward pass, has",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_in_place_recovery_that_is_impossible_resumes_from_checkpoint_and_recovers_later(
    tmp_path: Path,
    undisturbed: Outcome,
    capsys: pytest.CaptureFixture[str],
    make_module: Any,
    kill: Kill,
    notice: str,
) -> None:
    outcome = run(tmp_path, kill, Kill(0, 2 * STEPS + 1, "backward"), make_module=make_module)
    assert notice in capsys.readouterr().err
    assert len(outcome.get_events("attempt_started")) == 2
    assert len(outcome.get_events("recovered_in_place")) == 1
    for value, expected in zip(
        outcome.result.return_values, undisturbed.result.return_values, strict=True
    ):
        assert value["step"] == expected["step"]
        assert value["epoch"] == expected["epoch"]
    batches = {
        (rank, each["epoch"], each["index"]): each["samples"]
        for rank, records in enumerate(outcome.records)
        for each in records
        if "samples" in each
    }
    samples = Counter(sample for each in batches.values() for sample in each)
    assert samples == undisturbed.samples


@pytest.mark.parametrize(
    ("make_module", "kill", "notice"),
    [
        pytest.param(
            *(
                NetWithOwnCollective,
                Kill(1, STEPS + 3, "forward"),
                "calls torch.distributed itself",
            ),
            marks=pytest.mark.nightly,
        ),
        (Net, Kill(1, 0, "fit_start"), "has not begun its first step"),
        pytest.param(
            *(Net, Kill(1, EPOCHS * STEPS, "fit_end"), "has returned from its function"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_in_place_recovery_that_is_impossible_restarts_the_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make_module: Any,
    kill: Kill,
    notice: str,
) -> None:
    outcome = run(tmp_path, kill, make_module=make_module)
    assert notice in capsys.readouterr().err
    assert len(outcome.get_events("attempt_started")) == 2
    assert outcome.get_events("recovered_in_place") == []
    assert outcome.samples.keys() == set(range(NUM_SAMPLES))


class ManualNet(Net):
    """Module with its own optimization."""

    automatic_optimization = False


class NumberStream(IterableDataset[int]):
    """Stream of numbers."""

    def __iter__(self) -> Iterator[int]:
        yield from range(100)


def fit_with_unsupported_settings(config: dict[str, Any]) -> list[str]:
    """Return the errors of `fit` with several settings."""
    loaders = {
        "stream": DataLoader(NumberStream()),
        "sampler": DataLoader(range(9), sampler=[1, 2, 3]),  # type: ignore[arg-type]  # has len()
        "two": [make_loader(9, True), make_loader(9, True)],
    }
    options: list[dict[str, Any]] = [
        {"reload_dataloaders_every_n_epochs": 1},
        {"val_check_interval": "00:00:01:00"},
        {"callbacks": [StochasticWeightAveraging(0.1)]},
        {"callbacks": [LearningRateFinder()]},
        {"strategy": RayDDPStrategy(find_unused_parameters=True)},
    ]
    fits: list[Any] = [(Net, {"val_check_interval": 1.0}, each) for each in loaders.values()]
    fits += [(Net, each, make_loader(9, True)) for each in options]
    fits.append((ManualNet, {}, make_loader(9, True)))
    errors = []
    for make_module, arguments, loader in fits:
        trainer = make_trainer(**{"callbacks": [], **arguments})
        with pytest.raises(ValueError, match="recovery='restart'") as raised:
            trainer.fit(make_module(Recorder(config["directory"], ())), loader)
        errors.append(str(raised.value))
    with pytest.raises(ValueError, match="recovery='restart'") as raised:
        make_trainer([], strategy=RayFSDPStrategy())
    return [*errors, str(raised.value)]


def test_in_place_recovery_with_unsupported_settings_raises(tmp_path: Path) -> None:
    outcome = run(tmp_path, function=fit_with_unsupported_settings)
    names = [
        *["Return one torch DataLoader"] * 3,
        "reload_dataloaders_every_n_epochs=1",
        "a time as val_check_interval",
        "StochasticWeightAveraging",
        "LearningRateFinder",
        "find_unused_parameters",
        "automatic_optimization=False",
        "RayFSDPStrategy does not work",
    ]
    for errors in outcome.result.return_values:
        for error, name in zip(errors, names, strict=True):
            assert name in error


def test_in_place_recovery_with_sharded_model_raises_before_start() -> None:
    strategy = RayFSDPStrategy(num_workers=2, run_config=RunConfig(failure_config=IN_PLACE))
    with pytest.raises(ValueError, match=r"RayFSDPStrategy does not .* Use RayDDPStrategy\(\), or"):
        pl.Trainer(accelerator="cpu", strategy=strategy)
