"""Tests of `train.rollback()` in a training loop of PyTorch with batches whose loss is NaN."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar import train
from drawbar.torch import TorchTrainer, prepare_data_loader, prepare_model
from drawbar.torch._sampler import EpochSampler
from drawbar.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError, runs

pytestmark = pytest.mark.usefixtures("ray_cluster")

NUM_BATCHES = 16
BAD_BATCHES = (9, 10, 11)
SAVE_EVERY = 4


def make_data(batch: int) -> TensorDataset:
    """Return a dataset in which the last sample of each bad batch is NaN, on one rank only."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_BATCHES * batch, 3, generator=generator)
    for bad in BAD_BATCHES:
        x[(bad + 1) * batch - 1] = math.nan
    return TensorDataset(x, torch.arange(float(len(x))))


def train_function(config: dict[str, Any]) -> tuple[list[int], torch.Tensor]:
    """Return the numbers of the batches of the last attempt, and the weights."""
    context = train.get_context()
    torch.manual_seed(1)
    model: nn.Module = nn.Linear(3, 1)
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        model.load_state_dict(torch.load(Path(checkpoint.path) / "model.pt"))
    model = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = make_data(2 * context.get_world_size())
    loader = prepare_data_loader(DataLoader(data, batch_size=2, shuffle=False))
    other = prepare_data_loader(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    seen = []
    for x, sample in loader:
        number = int(sample[0]) // (2 * context.get_world_size())
        if number in config.get("leave_out", ()):
            continue
        seen.append(number)
        assert len(list(other)) == len(other)  # a loop over other data, which has ended
        loss = model(x).square().mean()
        if not math.isfinite(loss.item()):
            train.rollback("loss is nan", **config["rollback"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (number + 1) % SAVE_EVERY == 0:
            with train.checkpoint_dir() as path:
                state = getattr(model, "module", model).state_dict()
                if context.get_world_rank() == 0:
                    torch.save(state, path / "model.pt")
                train.report({"batch": number}, checkpoint=path)
        kill = Path(config.get("kill_once", os.devnull))
        if number > max(BAD_BATCHES) and context.get_world_rank() == 0 and not kill.exists():
            kill.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return seen, torch.cat([each.detach().flatten() for each in model.parameters()])


def make_trainer(
    tmp_path: Path, name: str, num_workers: int = 2, max_rollbacks: int = 3, **config: Any
) -> TorchTrainer:
    return TorchTrainer(
        train_function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name=name,
            storage_path=str(tmp_path),
            failure_config=FailureConfig(max_failures=1, max_rollbacks=max_rollbacks),
        ),
    )


def list_ends(path: Path) -> list[dict[str, Any]]:
    return [
        event for event in runs.find_run(path).list_events() if event["event"] == "attempt_ended"
    ]


@pytest.mark.parametrize("is_killed", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_rollback_of_one_rank_equals_run_without_the_batches(
    tmp_path: Path, is_killed: bool
) -> None:
    settings: dict[str, Any] = {"kill_once": str(tmp_path / "killed")} if is_killed else {}
    rollback = {"skip": 2, "to": 2}
    result = make_trainer(tmp_path, "rolled_back", rollback=rollback, **settings).fit()
    expected = make_trainer(tmp_path, "expected", leave_out=range(4, 12)).fit()
    seen, weights = result.return_value
    assert seen == list(range(12, NUM_BATCHES))
    assert torch.equal(weights, expected.return_value[1])
    ends = list_ends(tmp_path / "rolled_back")
    assert [end["cause"] for end in ends] == ["rollback", "worker"][: 1 + is_killed]
    assert ends[0]["budget"] == "max_rollbacks: 2 of 3 left"
    assert ends[0]["rollback"]["checkpoint"] == "checkpoint_000000"
    assert ends[0]["rollback"]["discarded"] == ["checkpoint_000001"]
    assert len(list((tmp_path / "rolled_back" / "broken").iterdir())) == 1
    decision = result.timeline.attempts[0].decision
    assert "skipping 2 batches: loss is nan" in decision
    assert "max_rollbacks: 2 of 3 left" in decision


def test_rollback_without_budget_left_ends_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "run", 0, max_rollbacks=1, rollback={})
    with pytest.raises(WorkerGroupError, match="max_rollbacks=1 is used up") as caught:
        trainer.fit()
    assert not caught.value.should_retry
    assert caught.value.failures[0].message == "loss is nan"
    # The start after the end of the run respects both rollbacks.
    result = make_trainer(tmp_path, "run", 0, rollback={}).fit()
    assert result.return_value[0] == [11, 12, 13, 14, 15][result.return_value[0][0] - 11 :]


def test_rollback_after_which_the_driver_is_killed_is_respected(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "from test_rollback import make_trainer\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "make_trainer(folder, 'run', 0, rollback={'skip': 2, 'to': 2}, "
        "kill_once=str(folder / 'killed')).fit()\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL
    rollback = {"skip": 2, "to": 2}
    result = make_trainer(tmp_path, "run", 0, rollback=rollback).fit()
    expected = make_trainer(tmp_path, "expected", 0, leave_out=range(4, 12)).fit()
    assert result.return_value[0] == list(range(12, NUM_BATCHES))
    assert torch.equal(result.return_value[1], expected.return_value[1])


def test_rollback_with_invalid_arguments_raises(tmp_path: Path) -> None:
    def function() -> list[str]:
        messages = []
        invalid: list[dict[str, Any]] = [
            {"reason": ""},
            {"skip": -1},
            {"to": 0},
            {"skip": True},
            {"reason": 1},
        ]
        for arguments in invalid:
            with pytest.raises((TypeError, ValueError)) as caught:
                train.rollback(**{"reason": "nan", **arguments})
            messages.append(str(caught.value))
        with pytest.raises(RuntimeError, match="prepare_data_loader"):
            train.rollback("nan")
        return messages

    run_config = RunConfig(storage_path=str(tmp_path))
    trainer = TorchTrainer(
        function, scaling_config=ScalingConfig(num_workers=0), run_config=run_config
    )
    assert len(trainer.fit().return_value) == 5


def test_rollback_between_epochs_begins_the_next_epoch(tmp_path: Path) -> None:
    def function() -> list[tuple[int, list[float]]]:
        loader = prepare_data_loader(DataLoader(TensorDataset(torch.arange(4.0)), batch_size=2))
        epochs = []
        for _ in range(2):
            rows = [float(row) for (batch,) in loader for row in batch]
            assert isinstance(loader.sampler, EpochSampler)
            epochs.append((loader.sampler.current_position.epoch, rows))
            if train.get_context().get_attempt() == 0:
                with pytest.raises(RuntimeError, match="needs a running loop"):
                    train.rollback("spike", skip=1)
                train.rollback("spike")
        return epochs

    run_config = RunConfig(storage_path=str(tmp_path))
    trainer = TorchTrainer(
        function, scaling_config=ScalingConfig(num_workers=0), run_config=run_config
    )
    rows = [0.0, 1.0, 2.0, 3.0]
    assert trainer.fit().return_value == [(1, rows), (2, rows)]


def test_rollback_to_checkpoint_of_earlier_epoch_leaves_out_epochs_in_between(
    tmp_path: Path,
) -> None:
    def function() -> list[tuple[int, list[list[float]]]]:
        loader = prepare_data_loader(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2))
        sampler = loader.sampler
        assert isinstance(sampler, EpochSampler)
        checkpoint = train.get_checkpoint()
        epochs: list[tuple[int, list[list[float]]]] = []
        first = 0 if checkpoint is None else int(Path(checkpoint.path, "epoch").read_text())
        for epoch in range(first, 4):
            sampler.set_epoch(epoch)
            epochs.append((epoch, rows := []))
            for number, (batch,) in enumerate(loader):
                rows.append(batch.tolist())
                if (epoch, number) == (0, 1) and checkpoint is None:
                    with train.checkpoint_dir() as path:
                        (path / "epoch").write_text(str(epoch))
                        train.report({"epoch": epoch}, checkpoint=path)
                if (epoch, number) == (2, 0) and train.get_context().get_attempt() == 0:
                    train.rollback("spike")
        return epochs

    trainer = TorchTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    batches = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert trainer.fit().return_value == [(0, []), (1, []), (2, batches[1:]), (3, batches)]
