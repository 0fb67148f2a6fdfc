"""Tests of a Trainer on two workers: losses, reports, and checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Sampler, WeightedRandomSampler

from drawbar import train
from drawbar.torch import TorchftConfig
from drawbar.train import Result

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

pytestmark = pytest.mark.usefixtures("ray_cluster")

CADENCES = {"save_strategy": "steps", "save_steps": 7, "eval_strategy": "steps", "eval_steps": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def killed(ray_cluster: None, tiny: Any, runs: Any, folder: Path) -> Result:
    """A run that is killed after its first checkpoint and resumes from it."""

    def function() -> Any:
        trainer = runs.on_ray(tiny.trainer(folder / "killed-output", **CADENCES), die_at=9)
        trainer.train()
        return train.get_context().get_attempt(), tiny.losses(trainer)

    result: Result = runs.fit(function, folder / "killed")
    return result


@pytest.fixture(scope="module")
def under_torchrun(
    tiny: Any, torchrun: Callable[..., Any], killed: Result, folder: Path
) -> dict[str, Any]:
    """Two plain Trainers on two processes: one trains, one resumes from a Drawbar checkpoint."""
    path = next(c.path for c, metrics in killed.best_checkpoints if metrics["step"] == 14)

    def function() -> Any:
        from transformers import AutoModelForCausalLM

        trainer = tiny.trainer(folder / "plain-output", **CADENCES)
        trainer.train()
        resumed = tiny.trainer(folder / "resumed-output", **CADENCES)
        resumed.train(resume_from_checkpoint=path)
        return {
            "trained": tiny.losses(trainer),
            "opened": AutoModelForCausalLM.from_pretrained(path).num_parameters(),
            "resumed": tiny.losses(resumed),
        }

    found: dict[str, Any] = torchrun(function)
    return found


def test_trainer_after_kill_has_losses_of_torchrun(
    under_torchrun: dict[str, Any], killed: Result
) -> None:
    expected = under_torchrun["trained"]
    assert sorted(expected) == list(range(1, 21))
    assert expected[20] < expected[1] - 0.5
    for attempt, losses in killed.return_values:
        assert attempt == 1
        assert losses == pytest.approx(expected, abs=1e-5)


def test_report_callback_reports_logs_on_all_ranks(killed: Result) -> None:
    for rank in (0, 1):
        frame = killed.metrics_dataframe.query(f"rank == {rank} and train_loss.isna()")
        frame = frame[(frame["attempt"] == 1) | (frame["step"] <= 7)]  # without the repeated steps
        logged = frame[frame["loss"].notna() & frame["eval_loss"].isna()]
        evaluated = frame[frame["loss"].isna() & frame["eval_loss"].notna()]
        assert list(logged["step"]) == list(range(1, 21))
        assert list(evaluated["step"]) == [5, 10, 15, 20]
    assert killed.metrics is not None
    assert {"loss", "eval_loss", "train_loss"} <= killed.metrics.keys()


def test_report_callback_checkpoint_has_latest_metrics(killed: Result) -> None:
    frame = killed.metrics_dataframe.query("rank == 0")
    evaluated = frame[frame["loss"].isna() & frame["eval_loss"].notna()].set_index("step")
    saved = {metrics["step"]: metrics for _, metrics in killed.best_checkpoints}
    assert list(saved) == [7, 14, 20]
    for step, metrics in saved.items():
        assert metrics["loss"] == killed.return_value[1][step]
        assert metrics["eval_loss"] == evaluated["eval_loss"][step // 5 * 5]
        assert metrics["epoch"] == step / 8


def test_report_callback_moves_checkpoint(killed: Result, folder: Path) -> None:
    assert list((folder / "killed-output").iterdir()) == []
    assert len(list((folder / "killed").rglob("optimizer.pt"))) == 3
    assert killed.checkpoint is not None
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {
        file.name for file in Path(killed.checkpoint.path).iterdir()
    }


def test_checkpoint_resumes_in_plain_transformers(
    under_torchrun: dict[str, Any], killed: Result
) -> None:
    assert under_torchrun["opened"] > 10_000
    assert under_torchrun["resumed"] == pytest.approx(killed.return_value[1], abs=1e-5)


class Stream(IterableDataset[dict[str, list[int]]]):
    """Rows without a length, in an order that `draw` returns for an epoch."""

    def __init__(self, rows: list[dict[str, list[int]]], draw: Callable[[int], Any]) -> None:
        self._rows = rows
        self._draw = draw
        self._epoch = 0

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return (self._rows[index] for index in self._draw(self._epoch))


class EpochStream(Stream):
    """A stream that the Trainer notifies of epochs."""

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch


class UnsizedSampler(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(64).tolist())


def make_stream(kind: str, rows: list[dict[str, list[int]]]) -> Any:
    """Return training data by its kind."""
    if kind == "stream":
        return Stream(rows, lambda epoch: range(64))
    if kind == "epoch_stream":
        return EpochStream(rows, lambda epoch: np.random.default_rng(epoch).permutation(64))
    if kind == "random_stream":
        return Stream(rows, lambda epoch: torch.randperm(64))
    if kind == "shuffled_dataset":
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)
        return stream.shuffle(seed=3, buffer_size=10)
    return rows


SAMPLERS: dict[str, dict[str, Any]] = {
    "by_length": {"train_sampling_strategy": "group_by_length"},
    "not_seedable": {"accelerator_config": {"use_seedable_sampler": False}},
}
STREAMS = ["stream", "epoch_stream", "random_stream", "shuffled_dataset", "unsized_sampler"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kinds", "num_workers"),
    [
        (["by_length", "custom", "not_seedable", *STREAMS], 0),
        (["custom", "epoch_stream"], 2),
    ],
    ids=["one_process", "two_workers"],
)
def test_restart_in_second_epoch_repeats_order_of_any_data(
    tiny: Any, runs: Any, tmp_path: Path, kinds: list[str], num_workers: int
) -> None:
    save_steps = 10 if num_workers else 18  # two steps after the first epoch

    def function(kind: str, die_at: int | None) -> list[float]:
        data = {"train_dataset": make_stream(kind, tiny.windows())}
        options = {"save_strategy": "steps", "save_steps": save_steps, **SAMPLERS.get(kind, {})}
        trainer = tiny.trainer(tmp_path / "output", **options, **data)
        if kind == "custom":
            trainer._get_train_sampler = lambda *_: WeightedRandomSampler([1.0] * 64, 64)
        if kind == "unsized_sampler":
            trainer._get_train_sampler = lambda *_: UnsizedSampler()
        runs.on_ray(trainer, die_at=die_at).train()
        logs = trainer.state.log_history[:20]
        return [value for log in logs for value in (log["epoch"], log["loss"])]

    for kind in kinds:
        complete, restarted = (
            runs.fit(partial(function, kind, die_at), tmp_path / f"{kind}-{die_at}", num_workers)
            for die_at in (None, save_steps + 1)
        )
        assert len(restarted.timeline.attempts) == 2
        assert restarted.return_values[0] == pytest.approx(complete.return_values[0], abs=1e-6)


def test_prepare_trainer_with_recovery_in_place_raises(
    tiny: Any, runs: Any, tmp_path: Path
) -> None:
    def function() -> None:
        with pytest.raises(ValueError, match="a new process cannot repeat"):
            runs.on_ray(tiny.trainer(tmp_path / "output"))

    torch_config = TorchftConfig(lighthouse_kwargs={})  # recovers in place
    result = runs.fit(function, tmp_path / "runs", torch_config=torch_config)
    assert result.error is None
