"""Restart after a kill yields the results of an uninterrupted run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from drawbar.lightgbm import RayTrainReportCallback, train
from drawbar.train import FailureConfig, Result, RunConfig, get_context
from tests.stops import stop_run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")  # it warns of itself


class Watch:
    """Notes which worker runs each attempt's first round; ends rank 1 once, in round 25."""

    order = 50
    before_iteration = True

    def __init__(self, notes: Path, end: Callable[[], None]) -> None:
        self.notes = notes
        self.end = end
        self.begun = False

    def __call__(self, env: Any) -> None:
        context = get_context()
        rank, attempt = context.get_world_rank(), context.get_attempt()
        if not self.begun:
            self.begun = True
            (self.notes / f"{attempt}-{rank}").write_text(f"{os.getpid()} {env.iteration}")
        if attempt == 0 and rank == 1 and env.iteration == 25:
            self.end()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise InterruptedError


def metrics_of(result: Result) -> dict[str, Any]:
    assert result.metrics is not None
    return result.metrics


def declared(**params: Any) -> dict[str, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(1200, 5)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] ** 2 + random.normal(size=1200) > 1).astype(int)
    rows = pd.DataFrame({f"f{i}": x[:, i] for i in range(5)} | {"y": y})
    return {
        "params": {"objective": "binary", "metric": ["binary_logloss", "auc"], **params},
        "train": rows[:800],
        "validation": rows[800:],
        "num_boost_round": 40,
        "early_stopping_rounds": 20,
    }


def booster_of(result: Result) -> lightgbm.Booster:
    assert result.checkpoint is not None
    return RayTrainReportCallback.get_model(result.checkpoint)


@pytest.mark.nightly
def test_17_rounds_a_kill_and_23_are_40(
    declare: Callable[..., Result], declare_on_ray: Callable[..., Result], tmp_path: Path
) -> None:
    whole = declare(**declared())
    killed = declare_on_ray(
        **declared(),
        callbacks=[RayTrainReportCallback(frequency=17), Watch(tmp_path, die)],
        run_config=RunConfig(
            name="killed", storage_path=tmp_path, failure_config=FailureConfig(max_failures=1)
        ),
    )
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


def test_stop_saves_in_this_round_and_resumes_there(
    declare: Callable[..., Result], tmp_path: Path
) -> None:
    callbacks = [RayTrainReportCallback(), Watch(tmp_path, stop_run)]
    stopped = booster_of(declare(**declared(), callbacks=callbacks, name="stopped"))
    assert stopped.num_trees() in (26, 27)
    resumed = booster_of(declare(**declared(), name="stopped"))
    whole = booster_of(declare(**declared(), name="whole"))
    x = np.random.default_rng(1).normal(size=(500, 5))
    assert np.array_equal(resumed.predict(x), whole.predict(x))


@pytest.mark.parametrize("boosting", ["dart", "rf"])
def test_resume_with_other_boosters_continues(
    declare: Callable[..., Result], boosting: str, tmp_path: Path
) -> None:
    options = {"bagging_freq": 1, "bagging_fraction": 0.7} if boosting == "rf" else {}
    result = declare(
        **declared(boosting=boosting, **options) | {"early_stopping_rounds": None},
        callbacks=[RayTrainReportCallback(frequency=17), Watch(tmp_path, fail)],
        max_failures=1,
    )
    assert len(result.timeline.attempts) == 2
    assert booster_of(result).num_trees() == 40
    assert metrics_of(result)["valid-auc"] > 0.8


@pytest.mark.parametrize("margin", [None, "m"])
def test_resume_with_learning_rates_and_margins_continues(
    declare: Callable[..., Result], tmp_path: Path, margin: str | None
) -> None:
    def options() -> dict[str, Any]:
        given = declared()
        train = given["train"].assign(m=given["train"]["f2"])
        return {
            "params": given["params"],
            "train": train if margin else given["train"],
            "num_boost_round": 40,
            "base_margin_column": margin,
        }

    def rates() -> Any:
        return lightgbm.reset_parameter(learning_rate=lambda number: 0.3 * 0.9**number)

    whole = declare(**options(), callbacks=[rates(), RayTrainReportCallback()])
    resumed = declare(
        **options(),
        name="resumed",
        max_failures=1,
        callbacks=[Watch(tmp_path, fail), rates(), RayTrainReportCallback(frequency=17)],
    )
    features = declared()["train"].drop(columns="y").assign(m=0.0)
    names = booster_of(whole).feature_name()
    expected = booster_of(whole).predict(features[names])
    assert np.array_equal(booster_of(resumed).predict(features[names]), expected)


def test_training_function_resumes_from_checkpoint(
    fit: Callable[..., Result], tmp_path: Path
) -> None:
    rows, unseen = declared()["train"], declared()["validation"]

    def function(*, fails: bool) -> Any:
        rank = get_context().get_world_rank()
        mine = rows[rank * 400 : rank * 400 + 400]
        data = lightgbm.Dataset(mine.drop(columns="y"), mine["y"])
        valid = data.create_valid(unseen.drop(columns="y")[rank::2], unseen["y"][rank::2])
        history: dict[str, Any] = {}
        booster = train(
            {**declared()["params"], "early_stopping_round": 20, "verbosity": -1, "num_threads": 1},
            data,
            40,
            valid_sets=[valid, data],
            valid_names=["valid", "own"],
            callbacks=[
                RayTrainReportCallback(frequency=17),
                lightgbm.record_evaluation(history),
                lightgbm.reset_parameter(learning_rate=lambda number: 0.3 * 0.9**number),
                *([Watch(tmp_path, fail)] if fails else []),
            ],
        )
        return booster.predict(rows.drop(columns="y")), booster.best_iteration, history

    whole = fit(lambda: function(fails=False), name="whole").return_values
    failed = fit(lambda: function(fails=True), name="failed", max_failures=1).return_values
    assert (tmp_path / "1-0").read_text().endswith(" 17")
    for one, other in zip(whole, failed, strict=True):
        assert np.array_equal(one[0], other[0])
        assert one[1:] == other[1:]


@pytest.mark.skipif(lightgbm.__version__ < "4.7", reason="LightGBM 4.7 reads Arrow streams")
def test_training_on_arrow_streams_resumes(fit: Callable[..., Result]) -> None:
    rows = declared()["train"]
    features, label = rows.drop(columns="y"), rows["y"]

    def fail_once(env: Any) -> None:
        if env.iteration == 7 and get_context().get_attempt() == 0:
            raise InterruptedError

    def function() -> Any:
        table = pa.Table.from_pandas(features, preserve_index=False)
        data = lightgbm.Dataset(table, pa.chunked_array([label]))
        callbacks: list[Any] = [RayTrainReportCallback(frequency=5), fail_once]
        return train({"verbosity": -1}, data, 10, callbacks=callbacks).predict(table)

    result = fit(function, num_workers=1, max_failures=1)
    alone = lightgbm.train({"verbosity": -1}, lightgbm.Dataset(features, label), 10)
    assert result.return_value == pytest.approx(alone.predict(features), abs=1e-6)


def test_resume_after_last_round_trains_nothing(fit: Callable[..., Result]) -> None:
    """A worker is killed between the checkpoint of the last round and its end."""
    rows = declared()["train"]

    def function() -> int:
        data = lightgbm.Dataset(rows.drop(columns="y"), rows["y"])
        booster = train({"verbosity": -1}, data, 5, callbacks=[RayTrainReportCallback(frequency=5)])
        if get_context().get_attempt() == 0:
            raise InterruptedError
        return booster.num_trees()

    assert fit(function, num_workers=1, max_failures=1).return_value == 5


def test_init_model_or_resume_with_init_score_raises(fit: Callable[..., Result]) -> None:
    rows = declared()["train"]

    def function() -> None:
        data = lightgbm.Dataset(rows.drop(columns="y"), rows["y"], init_score=rows["f2"])
        if get_context().get_attempt() == 0:
            callback = RayTrainReportCallback(frequency=5)
            first = train({"verbosity": -1}, data, 5, callbacks=[callback])
            with pytest.raises(ValueError, match="init_model cannot be combined with a dataset"):
                train({"verbosity": -1}, data, 5, init_model=first)
            raise InterruptedError
        with pytest.raises(ValueError, match="Cannot resume with a dataset that has an init_score"):
            train({"verbosity": -1}, data, 5)

    fit(function, num_workers=1, max_failures=1)
