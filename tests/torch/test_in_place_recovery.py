"""Tests of in-place recovery: ranks are killed, and the others stay in their function.

A disturbed and an undisturbed run use the same function. Each rank appends the samples of each step
to a file, and a rank kills itself once at each of the requested points.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar import train
from drawbar.torch import (
    TorchConfig,
    TorchTrainer,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
)
from drawbar.train import (
    Checkpoint,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    runs,
)
from drawbar.train._worker_group import actor_pool

pytestmark = pytest.mark.usefixtures("ray_cluster")

NUM_WORKERS = 3
NUM_SAMPLES = 72
BATCH_SIZE = 4
EPOCHS = 3
STEPS = NUM_SAMPLES // BATCH_SIZE // NUM_WORKERS


@dataclass(frozen=True)
class Kill:
    """Kill a rank once, after it has made a number of steps, at a place in the loop."""

    rank: int
    steps: int
    place: str


class Recorder:
    """Steps of a rank, in a file that outlives its process."""

    def __init__(self, directory: str, kills: tuple[Kill, ...]) -> None:
        self._directory = Path(directory)
        self._rank = train.get_context().get_world_rank()
        self._file = self._directory / f"rank_{self._rank}.jsonl"
        self._kills = [kill for kill in kills if kill.rank == self._rank]
        with (self._directory / f"pids_{self._rank}").open("a") as file:
            print(os.getpid(), file=file)
        if len((self._directory / f"pids_{self._rank}").read_text().splitlines()) > 1:
            self.die_at("start")

    @property
    def num_steps(self) -> int:
        return len(self._file.read_text().splitlines()) if self._file.exists() else 0

    def record(self, samples: torch.Tensor) -> None:
        with self._file.open("a") as file:
            print(json.dumps(samples.tolist()), file=file)

    def die_at(self, place: str, *_: object) -> None:
        for number, kill in enumerate(self._kills):
            marker = self._directory / f"killed_{self._rank}_{number}"
            if (kill.place, kill.steps) == (place, self.num_steps) and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)


class Centering(nn.Module):
    """Subtract a moving average, in a buffer that is replaced and that no state dict contains."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Centering(),
        nn.Linear(4, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(16, 1),
    )


def make_loader() -> DataLoader[Any]:
    x = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(torch.arange(NUM_SAMPLES), x, x.sum(1, keepdim=True))
    return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)


def train_func(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    recorder = Recorder(config["directory"], config["kills"])
    model: Any = prepare_model(make_model())
    next(iter(model.parameters())).register_hook(lambda _: recorder.die_at("backward"))
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.9)
    loader = prepare_data_loader(make_loader())
    for epoch in range(EPOCHS):
        total = 0.0
        for samples, x, y in loader:
            recorder.die_at("forward")
            loss: Any = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total += loss.item()
            recorder.record(samples)
            recorder.die_at("step")
        recorder.die_at("epoch")
        if config.get("checkpoints"):
            with train.checkpoint_dir() as path:
                torch.save(epoch, path / "epoch.pt")
                train.report({"epoch": epoch, "total": total}, checkpoint=path)
        else:
            train.report({"epoch": epoch, "total": total})
        train.collective.barrier()
    weights = {name: value.clone() for name, value in model.module.state_dict().items()}
    return {**weights, "mean": model.module[0].mean}


@pytest.fixture
def run(
    fit: Callable[..., Result], run_config: RunConfig, tmp_path: Path
) -> Callable[..., tuple[Result, list[int]]]:
    """`run(*kills, **options)` trains and returns the result and the samples of all steps."""

    def run(*kills: Kill, function: Any = train_func, **options: Any) -> tuple[Result, list[int]]:
        failures = {"max_failures": 5, "recovery": "in_place"} | options.pop("failures", {})
        torch_config = TorchConfig(backend="gloo", timeout_s=options.pop("timeout_s", 1800))
        name = f"run_{len(list(tmp_path.glob('samples_of_*')))}"
        directory = tmp_path / f"samples_of_{name}"
        directory.mkdir()
        config = {"directory": str(directory), "kills": kills, **options}
        result = fit(
            function,
            train_loop_config=config,
            torch_config=torch_config,
            scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
            run_config=replace(run_config, name=name, failure_config=FailureConfig(**failures)),
        )
        samples = [
            sample
            for file in directory.glob("rank_*.jsonl")
            for line in file.read_text().splitlines()
            for sample in json.loads(line)
        ]
        return result, samples

    return run


def get_events(result: Result, kind: str) -> list[dict[str, Any]]:
    return [each for each in runs.find_run(result.path).list_events() if each["event"] == kind]


def assert_equal_weights(result: Result, other: Result) -> None:
    for rank, weights in enumerate(result.return_values):
        for name, value in weights.items():
            if rank == 0 or "running" not in name:  # DDP does not copy the last buffers
                torch.testing.assert_close(value, other.return_values[rank][name])


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([Kill(1, 8, "backward")], marks=pytest.mark.nightly),
        pytest.param([Kill(0, 8, "forward")], marks=pytest.mark.nightly),
        pytest.param([Kill(2, 3, "step")], marks=pytest.mark.nightly),
        pytest.param([Kill(1, 2 * STEPS, "epoch")], marks=pytest.mark.nightly),
        [Kill(0, 8, "backward"), Kill(1, 8, "backward")],
        pytest.param(
            [Kill(2, 4, "backward"), Kill(2, 9, "step"), Kill(0, 14, "forward")],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["backward", "rank_0", "between_steps", "end_of_epoch", "two_at_once", "one_by_one"],
)
def test_in_place_recovery_equals_undisturbed_run(
    run: Callable[..., tuple[Result, list[int]]], kills: list[Kill]
) -> None:
    undisturbed, samples = run()
    means = [weights["mean"] for weights in undisturbed.return_values]
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert Counter(samples) == dict.fromkeys(range(NUM_SAMPLES), EPOCHS)
    result, disturbed_samples = run(*kills)
    assert Counter(disturbed_samples) == Counter(samples)
    assert_equal_weights(result, undisturbed)
    recovered = get_events(result, "recovered_in_place")
    assert sum(len(event["ranks"]) for event in recovered) == len(kills)
    assert len(get_events(result, "attempt_started")) == 1


def die_when_spare_is_ready(config: dict[str, Any]) -> float:
    """Let rank 1 die as soon as the run has a spare process. Return when this process started."""
    context, killed = train.get_context(), Path(config["directory"]) / "killed"
    model: Any = prepare_model(make_model())
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _, x, y in prepare_data_loader(make_loader()):
        loss: Any = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if context.get_world_rank() == 1 and not killed.exists():
            wait_for_spare(str(killed.parents[1]))
            killed.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
    return float(psutil.Process().create_time())


def wait_for_spare(path: str) -> set[int]:
    """Wait until a run has a spare process, and return the IDs of all its processes.

    Each process has a sentinel, which receives the ID. Nothing announces the spare process.
    """
    processes = set[int]()
    while len(processes) <= NUM_WORKERS:
        commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        processes = {
            int(arguments[index + 1])
            for arguments in commands
            for index, argument in enumerate(arguments[:-1])
            if argument.endswith("sentinel.py") and path in " ".join(arguments)
        }
    return processes


def test_in_place_recovery_uses_the_spare_process(
    run: Callable[..., tuple[Result, list[int]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(actor_pool, "SPARE_DELAY_S", 0)
    result, _ = run(function=die_when_spare_is_ready)
    killed_at = float(next(tmp_path.rglob("killed")).read_text())
    assert len(get_events(result, "recovered_in_place")) == 1
    assert result.return_values[1] < killed_at


def test_in_place_recovery_keeps_reports_and_checkpoints(
    run: Callable[..., tuple[Result, list[int]]],
) -> None:
    kills = [Kill(0, STEPS, "epoch"), Kill(1, STEPS + 2, "backward"), Kill(0, 2 * STEPS, "step")]
    result, samples = run(*kills, checkpoints=True)
    assert Counter(samples) == dict.fromkeys(range(NUM_SAMPLES), EPOCHS)
    assert len(get_events(result, "attempt_started")) == 1
    committed = get_events(result, "checkpoint")
    assert [event["metrics"]["epoch"] for event in committed] == list(range(EPOCHS))
    frame = result.metrics_dataframe
    reports = sorted(zip(frame["epoch"], frame["rank"], strict=True))
    assert reports == list(product(range(EPOCHS), range(NUM_WORKERS)))
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as path:
        assert torch.load(Path(path) / "epoch.pt") == EPOCHS - 1


def test_in_place_recovery_of_rank_killed_before_it_joins_starts_another_process(
    run: Callable[..., tuple[Result, list[int]]],
) -> None:
    result, samples = run(Kill(1, 4, "backward"), Kill(1, 4, "start"))
    assert Counter(samples) == dict.fromkeys(range(NUM_SAMPLES), EPOCHS)
    assert [event["ranks"] for event in get_events(result, "recovered_in_place")] == [[1]]
    assert len(get_events(result, "attempt_started")) == 1


def die_with_spare(config: dict[str, Any]) -> None:
    """Let rank 1 and the spare process die at the same time."""
    training, directory = Training(config), Path(config["directory"])
    for _ in training.iter_losses():
        if train.get_context().get_world_rank() == 1 and not (directory / "killed").exists():
            (directory / "killed").touch()
            ranks = {int(pid) for file in directory.glob("pids_*") for pid in file.open()}
            for pid in [*(wait_for_spare(str(directory.parent)) - ranks), os.getpid()]:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.nightly
def test_in_place_recovery_of_rank_killed_with_spare_and_replacement_starts_another_process(
    run: Callable[..., tuple[Result, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_pool, "SPARE_DELAY_S", 0)
    result, samples = run(Kill(1, 1, "start"), function=die_with_spare)
    assert Counter(samples) == dict.fromkeys(range(NUM_SAMPLES), 1)
    assert [event["ranks"] for event in get_events(result, "recovered_in_place")] == [[1]]
    assert len(get_events(result, "attempt_started")) == 1


def test_in_place_recovery_with_used_budget_fails_the_run(
    run: Callable[..., tuple[Result, list[int]]],
) -> None:
    with pytest.raises(TrainingFailedError, match="max_failures=1 is used up"):
        run(Kill(1, 4, "backward"), Kill(2, 9, "backward"), failures={"max_failures": 1})


def test_in_place_recovery_counts_deaths_of_new_processes_and_names_the_first(
    run: Callable[..., tuple[Result, list[int]]],
) -> None:
    result, _ = run(Kill(1, 4, "backward"), Kill(1, 4, "start"), failures={"max_failures": 1})
    assert get_events(result, "recovered_in_place") == []
    assert len(get_events(result, "attempt_started")) == 2
    assert "SIGKILL" in str(get_events(result, "attempt_ended")[0]["failure_headlines"])


class Training:
    """Prepared objects of a training function, and its loop over one epoch."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.recorder = Recorder(config["directory"], config["kills"])
        self.model: Any = prepare_model(make_model())
        self._optimizer = prepare_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))
        self._loader = prepare_data_loader(make_loader())

    def iter_losses(self) -> Iterator[torch.Tensor]:
        """Yield the loss of each step of an epoch."""
        for samples, x, y in self._loader:
            self.recorder.die_at("forward")
            loss: Any = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self._optimizer.step()
            self.recorder.record(samples)
            yield loss


def report_on_rank_0(config: dict[str, Any]) -> None:
    training = Training(config)
    for _ in range(EPOCHS):
        for _ in training.iter_losses():
            if train.get_context().get_world_rank() == 0:
                train.report({"step": training.recorder.num_steps})


def test_in_place_recovery_of_only_rank_that_reports_keeps_its_reports(
    run: Callable[..., tuple[Result, list[int]]],
) -> None:
    result, samples = run(Kill(0, 8, "forward"), function=report_on_rank_0)
    assert Counter(samples) == dict.fromkeys(range(NUM_SAMPLES), EPOCHS)
    assert len(get_events(result, "attempt_started")) == 1
    frame = result.metrics_dataframe
    lost = {8}  # a process that is killed loses reports that it has not sent yet
    assert sorted({*frame["step"].tolist(), *lost}) == list(range(1, EPOCHS * STEPS + 1))
    assert frame["step"].is_unique


def count_steps_itself(config: dict[str, Any]) -> None:
    training = Training(config)
    for step, _ in enumerate(training.iter_losses()):
        if step % 4 == 3:
            with train.checkpoint_dir() as path:
                torch.save(step, path / "step.pt")
                train.report({"step": step}, checkpoint=path)


def test_in_place_recovery_with_ranks_that_wait_for_lost_count_restarts_the_run(
    run: Callable[..., tuple[Result, list[int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {"stall_warning_after": 2.0}
    result, _ = run(Kill(1, 2, "forward"), function=count_steps_itself, failures=failures)
    assert len(get_events(result, "attempt_started")) == 2
    assert "may count its steps itself" in capsys.readouterr().err


def call_torch_distributed(config: dict[str, Any]) -> None:
    dist.barrier()
    train_func(config)


def train_without_prepared_optimizer(config: dict[str, Any]) -> None:
    recorder = Recorder(config["directory"], config["kills"])
    model = prepare_model(make_model())
    for samples, x, y in prepare_data_loader(make_loader()):
        recorder.die_at("forward")
        loss: Any = nn.functional.mse_loss(model(x), y)
        loss.backward()
        recorder.record(samples)


def use_variable_of_skipped_epoch(config: dict[str, Any]) -> None:
    training = Training(config)
    for _ in range(EPOCHS):
        for loss in training.iter_losses():
            last_loss = loss.item()
        train.report({"loss": last_loss})


def change_weights_between_epochs(config: dict[str, Any]) -> None:
    training = Training(config)
    for _ in range(EPOCHS):
        for _ in training.iter_losses():
            pass
        training.recorder.die_at("epoch")
        for param in training.model.parameters():
            param.data *= 0.8


def change_weights_in_forward_pass(config: dict[str, Any]) -> None:
    training = Training(config)

    @torch.no_grad()
    def shrink(model: nn.Module, inputs: object) -> None:
        for param in model.parameters():
            param.mul_(0.9)

    training.model.register_forward_pre_hook(shrink)
    for _ in training.iter_losses():
        pass


def die_in_upload(config: dict[str, Any]) -> None:
    training = Training(config)

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        training.recorder.die_at("upload")
        path = train.get_context().get_storage().build_checkpoint_path_from_name(name)
        shutil.copytree(checkpoint.path, path)
        return Checkpoint(path)

    for _ in training.iter_losses():
        pass
    if train.get_context().get_world_rank() == 0:
        path = Path(config["directory"]) / "model"
        path.mkdir(exist_ok=True)
        (path / "epoch").write_text("0")
        train.report({}, checkpoint=path, checkpoint_upload_fn=upload)
    else:
        train.report({})
    train.collective.barrier()


def raise_on_one_rank(config: dict[str, Any]) -> None:
    marker = Path(config["directory"]) / "raised"
    if train.get_context().get_world_rank() == 1 and not marker.exists():
        marker.touch()
        raise ValueError("a bug")
    train_func(config)


def use_fsdp(config: dict[str, Any]) -> None:
    prepare_model(make_model(), parallel_strategy="fsdp2")


def test_in_place_recovery_with_sharded_model_raises(
    run: Callable[..., tuple[Result, list[int]]],
) -> None:
    with pytest.raises(TrainingFailedError, match="Set parallel_strategy='ddp', or recovery="):
        run(function=use_fsdp)


def wait_in_first_attempt(config: dict[str, Any]) -> None:
    training = Training(config)
    marker = Path(config["directory"]) / "waited"
    for _ in training.iter_losses():
        if train.get_context().get_world_rank() == 1 and not marker.exists():
            marker.touch()
            while True:
                threading.Event().wait(0.01)  # until the restart


@pytest.mark.nightly  # it waits 30 s for the notice of a death
def test_in_place_recovery_applies_timeout_of_torch_config(
    run: Callable[..., tuple[Result, list[int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    result, _ = run(function=wait_in_first_attempt, timeout_s=3)
    assert len(get_events(result, "attempt_started")) == 2
    assert "Timed out waiting 3000ms" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "kills", "notice"),
    [
        (call_torch_distributed, [Kill(1, 4, "backward")], "calls torch.distributed itself"),
        pytest.param(
            train_without_prepared_optimizer,
            [Kill(1, 4, "forward")],
            "has not prepared a model",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            use_variable_of_skipped_epoch,
            [Kill(1, STEPS + 2, "forward")],
            "UnboundLocalError",
            marks=pytest.mark.nightly,
        ),
        (change_weights_between_epochs, [Kill(1, STEPS, "epoch")], "that changes no weights"),
        (
            change_weights_in_forward_pass,
            [Kill(1, 4, "forward")],
            "does not change trained weights",
        ),
        pytest.param(
            die_in_upload,
            [Kill(0, STEPS, "upload")],
            "a checkpoint that is not committed",
            marks=pytest.mark.nightly,
        ),
        (raise_on_one_rank, [], "a bug"),
    ],
)
def test_in_place_recovery_that_is_impossible_restarts_the_run(
    run: Callable[..., tuple[Result, list[int]]],
    capsys: pytest.CaptureFixture[str],
    function: Any,
    kills: list[Kill],
    notice: str,
) -> None:
    result, _ = run(*kills, function=function)
    assert len(get_events(result, "attempt_started")) == 2
    assert get_events(result, "recovered_in_place") == []
    assert notice in capsys.readouterr().err
    assert result.error is None


def test_in_place_recovery_with_impossible_settings_raises_before_start(
    run_config: RunConfig,
) -> None:
    failures = FailureConfig(recovery="in_place", max_failures=1)
    run_config = replace(run_config, failure_config=failures)
    trainers: list[tuple[str, DataParallelTrainer]] = [
        ("num_workers is 1", TorchTrainer(print, run_config=run_config)),
        (
            "fixed number of workers",
            TorchTrainer(
                print, run_config=run_config, scaling_config=ScalingConfig(num_workers=(2, 3))
            ),
        ),
        (
            "needs CPU workers",
            TorchTrainer(
                print,
                run_config=run_config,
                scaling_config=ScalingConfig(num_workers=2, use_gpu=True),
            ),
        ),
        (
            "needs drawbar.torch.TorchTrainer",
            DataParallelTrainer(
                print, run_config=run_config, scaling_config=ScalingConfig(num_workers=2)
            ),
        ),
        (
            "needs workers that are Ray actors",
            TorchTrainer(print, run_config=run_config, scaling_config=ScalingConfig(num_workers=0)),
        ),
    ]
    for message, trainer in trainers:
        with pytest.raises(ValueError, match=message):
            trainer.fit()
    with pytest.raises(ValueError, match="needs stall_warning_after"):
        FailureConfig(recovery="in_place", max_failures=1, stall_warning_after=None)
    with pytest.raises(ValueError, match="needs max_failures"):
        FailureConfig(recovery="in_place")
    with pytest.raises(ValueError, match="recovery"):
        FailureConfig(recovery="in_memory", max_failures=1)  # type: ignore[arg-type]
