"""Tests of a Trainer on two workers: losses, reports, and checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from drawbar import train
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
