"""A run that was killed goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest
import ray

from drawbar.lightgbm import LightGBMTrainer, RayTrainReportCallback
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig, get_context

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")  # it warns of itself


class Watch:
    """Notes which worker runs each attempt's first round; kills rank 1 once, in round 25."""

    order = 50
    before_iteration = True

    def __init__(self, notes: Path, *, kill: bool) -> None:
        self.notes = notes
        self.kill = kill
        self.begun = False

    def __call__(self, env: Any) -> None:
        context = get_context()
        rank, attempt = context.get_world_rank(), context.get_attempt()
        if not self.begun:
            self.begun = True
            (self.notes / f"{attempt}-{rank}").write_text(f"{os.getpid()} {env.iteration}")
        if self.kill and attempt == 0 and rank == 1 and env.iteration == 25:
            os.kill(os.getpid(), signal.SIGKILL)


def metrics_of(result: Result) -> dict[str, Any]:
    assert result.metrics is not None
    return result.metrics


@pytest.fixture
def run(tmp_path: Path, ray_cluster: None) -> Callable[..., Result]:
    random = np.random.default_rng(0)
    x = random.normal(size=(1200, 5)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] ** 2 + random.normal(size=1200) > 1).astype(int)
    columns = {f"f{i}": x[:, i] for i in range(5)} | {"y": y}
    train, valid = (
        {name: column[rows] for name, column in columns.items()}
        for rows in (slice(0, 800), slice(800, None))
    )

    def run(name: str, *, kill: bool, **params: Any) -> Result:
        return LightGBMTrainer(
            params={"objective": "binary", "metric": ["binary_logloss", "auc"], **params},
            label_column="y",
            num_boost_round=40,
            early_stopping_rounds=20,
            callbacks=[RayTrainReportCallback(frequency=17), Watch(tmp_path, kill=kill)],
            datasets={"train": dataset(train), "valid": dataset(valid)},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name=name,
                storage_path=tmp_path,
                failure_config=FailureConfig(max_failures=1 if kill else 0),
            ),
        ).fit()

    return run


def dataset(columns: dict[str, Any]) -> Any:
    rows = len(columns["y"])
    return ray.data.from_items([{k: v[i].item() for k, v in columns.items()} for i in range(rows)])


def booster_of(result: Result) -> lightgbm.Booster:
    assert result.checkpoint is not None
    return RayTrainReportCallback.get_model(result.checkpoint)


def test_17_rounds_a_kill_and_23_are_40(run: Callable[..., Result], tmp_path: Path) -> None:
    whole, killed = run("whole", kill=False), run("killed", kill=True)
    assert len(killed.timeline.attempts) == 2
    pid = (tmp_path / "0-0").read_text().split()[0]
    assert (tmp_path / "1-0").read_text() == f"{pid} 17"  # kept, and on from the checkpoint
    assert (tmp_path / "1-1").read_text().endswith(" 17")

    expected, found = booster_of(whole), booster_of(killed)
    x = np.random.default_rng(1).normal(size=(500, 5))
    assert np.array_equal(found.predict(x), expected.predict(x))
    assert found.num_trees() == expected.num_trees()
    assert found.best_iteration == expected.best_iteration > 0
    rows = [r.metrics_dataframe.query("rank == 0")["valid-auc"] for r in (whole, killed)]
    assert list(rows[1][-23:]) == list(rows[0][-23:])


@pytest.mark.parametrize("boosting", ["dart", "rf"])
def test_other_boosters_go_on(run: Callable[..., Result], boosting: str) -> None:
    options = {"bagging_freq": 1, "bagging_fraction": 0.7} if boosting == "rf" else {}
    result = run(boosting, kill=True, boosting=boosting, **options)
    assert booster_of(result).num_trees() == 40
    assert metrics_of(result)["valid-auc"] > 0.8
