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
def whole(ray_cluster: None, tiny: Any, runs: Any, folder: Path) -> Result:
    """A run that nothing interrupts, of a model without dropout."""

    def function() -> Any:
        trainer = tiny.trainer(folder / "whole-output", tiny.gpt(dropout=0), **CADENCES)
        trainer = runs.on_ray(trainer)
        trainer.train()
        return tiny.losses(trainer)

    result: Result = runs.fit(function, folder / "whole")
    return result


@pytest.fixture(scope="module")
def under_torchrun(
    tiny: Any, torchrun: Callable[..., Any], whole: Result, folder: Path
) -> dict[str, Any]:
    """Two plain Trainers on two processes: one trains, one resumes from a Drawbar checkpoint."""
    path = next(c.path for c, metrics in whole.best_checkpoints if metrics["step"] == 14)

    def function() -> Any:
        from transformers import AutoModelForCausalLM

        trainer = tiny.trainer(folder / "alone-output", **CADENCES)
        trainer.train()
        resumed = tiny.trainer(folder / "resumed-output", tiny.gpt(dropout=0), **CADENCES)
        resumed.train(resume_from_checkpoint=path)
        return {
            "trained": tiny.losses(trainer),
            "opened": AutoModelForCausalLM.from_pretrained(path).num_parameters(),
            "resumed": tiny.losses(resumed),
        }

    found: dict[str, Any] = torchrun(function)
    return found


def test_trainer_on_two_workers_has_losses_of_one_process(
    tiny: Any, runs: Any, whole: Result, folder: Path
) -> None:
    def trainer() -> Any:
        model = tiny.gpt(dropout=0)
        return tiny.trainer(folder / "one-output", model, per_device_train_batch_size=8)

    alone = runs.losses_of_one_process(folder / "one", trainer)
    assert sorted(alone) == list(range(1, 21))
    assert alone[20] < alone[1] - 0.5
    assert whole.return_value == pytest.approx(alone, abs=1e-5)


def test_trainer_after_kill_has_losses_of_torchrun(
    tiny: Any, runs: Any, under_torchrun: dict[str, Any], folder: Path
) -> None:
    def killed() -> Any:
        trainer = runs.on_ray(tiny.trainer(folder / "killed-output", **CADENCES), die_at=9)
        trainer.train()
        return train.get_context().get_attempt(), tiny.losses(trainer)

    result = runs.fit(killed, folder / "killed")
    for attempt, losses in result.return_values:
        assert attempt == 1
        assert losses == pytest.approx(under_torchrun["trained"], abs=1e-5)
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [7, 14, 20]
    rows = result.metrics_dataframe.query("rank == 0 and loss.notna()")
    assert sorted(set(rows["step"])) == list(range(1, 21))


def test_report_callback_reports_logs_on_all_ranks(whole: Result) -> None:
    for rank in (0, 1):
        frame = whole.metrics_dataframe.query(f"rank == {rank} and train_loss.isna()")
        logged = frame[frame["loss"].notna() & frame["eval_loss"].isna()]
        evaluated = frame[frame["loss"].isna() & frame["eval_loss"].notna()]
        assert list(logged["step"]) == list(range(1, 21))
        assert list(evaluated["step"]) == [5, 10, 15, 20]
    assert whole.metrics is not None
    assert {"loss", "eval_loss", "train_loss"} <= whole.metrics.keys()


def test_report_callback_checkpoint_has_latest_metrics(whole: Result) -> None:
    frame = whole.metrics_dataframe.query("rank == 0")
    evaluated = frame[frame["loss"].isna() & frame["eval_loss"].notna()].set_index("step")
    saved = {metrics["step"]: metrics for _, metrics in whole.best_checkpoints}
    assert list(saved) == [7, 14, 20]
    for step, metrics in saved.items():
        assert metrics["loss"] == whole.return_value[step]
        assert metrics["eval_loss"] == evaluated["eval_loss"][step // 5 * 5]
        assert metrics["epoch"] == step / 8


def test_report_callback_moves_checkpoint(whole: Result, folder: Path) -> None:
    assert list((folder / "whole-output").iterdir()) == []
    assert len(list((folder / "whole").rglob("optimizer.pt"))) == 3
    assert whole.checkpoint is not None
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {
        file.name for file in Path(whole.checkpoint.path).iterdir()
    }


def test_checkpoint_resumes_in_plain_transformers(
    under_torchrun: dict[str, Any], whole: Result
) -> None:
    assert under_torchrun["opened"] > 10_000
    assert under_torchrun["resumed"] == pytest.approx(whole.return_value, abs=1e-5)
