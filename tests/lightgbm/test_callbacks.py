"""Callbacks of a LightGBMTrainer that trains from parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from lightgbm.callback import CallbackEnv, EarlyStopException

from drawbar.lightgbm import RayTrainReportCallback
from drawbar.train import Result

BINARY = {"objective": "binary", "metric": "auc", "verbosity": -1}


@pytest.fixture
def rows(binary: Any) -> dict[str, pd.DataFrame]:
    x, y = binary
    frame = pd.DataFrame({f"f{i}": x[:, i] for i in range(x.shape[1])} | {"y": y})
    return {"train": frame[:1500], "validation": frame[1500:]}


class Halving:
    """Objective and callback: each round halves the gradients of the objective."""

    before_iteration = True

    def __init__(self, log: Path) -> None:
        self.factor = 1.0
        self.log = log

    def __call__(self, env: CallbackEnv) -> None:
        self.factor /= 2

    def objective(self, predicted: Any, data: Any) -> tuple[Any, Any]:
        with open(self.log, "a") as log:
            print(self.factor, file=log)
        probability = 1 / (1 + np.exp(-predicted))
        return (probability - data.get_label()) * self.factor, probability * (1 - probability)


def test_objective_shares_state_with_callback(
    declare: Callable[..., Result], rows: Any, tmp_path: Path
) -> None:
    halving = Halving(tmp_path / "log")
    declare(
        {**BINARY, "objective": halving.objective},
        **rows,
        num_workers=1,
        num_boost_round=3,
        callbacks=[halving],
    )
    assert halving.log.read_text().split() == ["0.5", "0.25", "0.125"]


@pytest.mark.parametrize("order", [0, 40], ids=["before the report", "after the report"])
def test_callback_may_add_tuples_to_evaluations(
    declare: Callable[..., Result], rows: Any, order: int
) -> None:
    def add(env: CallbackEnv) -> None:
        assert env.evaluation_result_list is not None
        added: Any = ("valid", "half", 0.5, False)
        env.evaluation_result_list.append(added)

    add.order = order  # type: ignore[attr-defined]  # LightGBM's attribute of functions
    result = declare(BINARY, **rows, num_workers=1, callbacks=[add])
    assert result.checkpoint is not None
    assert result.metrics is not None
    assert ("valid-half" in result.metrics) == (order == 0)


def test_callback_that_stops_before_a_round_ends_training(
    declare: Callable[..., Result], rows: Any
) -> None:
    def stop(env: CallbackEnv) -> None:
        if env.iteration == 4:
            raise EarlyStopException(2, [])

    stop.before_iteration = True  # type: ignore[attr-defined]  # LightGBM's attribute of functions
    result = declare(BINARY, **rows, num_workers=1, callbacks=[stop])
    assert result.checkpoint is not None
    booster = RayTrainReportCallback.get_model(result.checkpoint)
    assert (booster.num_trees(), booster.best_iteration) == (4, 3)


def test_two_report_callbacks_record_each_round_once(
    declare: Callable[..., Result], rows: Any
) -> None:
    reports = [RayTrainReportCallback(), RayTrainReportCallback(filename="other.txt")]
    result = declare(BINARY, **rows, num_workers=1, num_boost_round=6, callbacks=reports)
    assert result.checkpoint is not None
    progress = json.loads((Path(result.checkpoint.path) / "progress.json").read_text())
    assert (progress["rounds"], len(progress["history"]["valid"]["auc"])) == (6, 6)
