"""A run goes on from its newest checkpoint by itself, and ends as one that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drawbar.lightning import RayTrainReportCallback
from drawbar.train import Result
from tests.lightning.digits import SAMPLES, STEPS, fit, losses

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),  # Lightning's
]


def every_4_steps(pl: Any) -> list[Any]:
    return [RayTrainReportCallback(every_n_train_steps=4)]


def every_epoch(pl: Any) -> list[Any]:
    return [RayTrainReportCallback()]


def saved(result: Result) -> list[tuple[int, int]]:
    return [(metrics["epoch"], metrics["step"]) for _, metrics in result.best_checkpoints]


def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = fit(tmp_path, every_4_steps, run="whole", num_workers=0)
    die_at = (11, 18)  # after a checkpoint at an epoch's end, and after one in mid-epoch
    killed = fit(tmp_path, every_4_steps, run="killed", die_at=die_at, package="pytorch_lightning")
    assert losses(killed).keys() == losses(whole).keys() == set(range(3 * STEPS))
    assert losses(killed) == pytest.approx(losses(whole), abs=1e-5)
    assert saved(killed) == saved(whole)
    assert set(killed.metrics_dataframe["attempt"]) == {0, 1, 2}


def test_each_sample_of_an_interrupted_epoch_is_seen_once(tmp_path: Path) -> None:
    def no_epochs(pl: Any) -> list[Any]:
        return [RayTrainReportCallback(every_n_train_steps=4, every_n_epochs=None)]

    first = fit(tmp_path, no_epochs, num_workers=0, max_steps=4).return_value
    second = fit(tmp_path, no_epochs, num_workers=0, max_epochs=1).return_value
    assert sorted(first + second) == list(range(SAMPLES))


def test_an_explicit_path_wins(tmp_path: Path) -> None:
    first = fit(tmp_path, every_epoch, num_workers=0, max_epochs=2)
    checkpoint, metrics = first.best_checkpoints[0]
    assert metrics["step"] == STEPS
    path = {"ckpt_path": f"{checkpoint.path}/checkpoint.ckpt"}
    second = fit(tmp_path, every_epoch, num_workers=0, max_epochs=3, fit_options=path)
    assert len(second.return_value) == 2 * SAMPLES


def test_a_resumed_trainer_tests_what_it_has_trained(tmp_path: Path) -> None:
    def after(trainer: Any, module: Any) -> Any:
        (found,) = trainer.validate(module, verbose=False)
        return trainer.ckpt_path, found["val_loss"]

    fit(tmp_path, every_epoch, num_workers=0, max_epochs=1)
    result = fit(tmp_path, every_epoch, num_workers=0, max_epochs=2, after=after)
    assert result.checkpoint is not None
    manifest = result.checkpoint.manifest
    assert manifest is not None
    assert result.return_value == (None, pytest.approx(manifest.metrics["val_loss"]))
