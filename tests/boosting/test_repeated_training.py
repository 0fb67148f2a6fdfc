"""A function trains several times, as one does over folds: each training is its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost

import drawbar.lightgbm
import drawbar.xgboost
from drawbar.train import FailureConfig, RunConfig, ScalingConfig, get_context

ROUNDS = 4
FEATURES = np.random.default_rng(0).normal(size=(200, 2))
XGBOOST = {"objective": "reg:squarederror", "nthread": 1}
LIGHTGBM = {"objective": "regression", "num_threads": 1, "verbosity": -1}

Predictions = Any  # an array, one for each row


def xgboost_alone(labels: Any) -> Predictions:
    rows = xgboost.DMatrix(FEATURES, labels)
    return xgboost.train(XGBOOST, rows, ROUNDS).predict(rows)


def lightgbm_alone(labels: Any) -> Predictions:
    return lightgbm.train(LIGHTGBM, lightgbm.Dataset(FEATURES, labels), ROUNDS).predict(FEATURES)


def with_xgboost(labels: Any, each_round: Callable[[int], None]) -> Predictions:
    class Watch(xgboost.callback.TrainingCallback):
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            each_round(epoch)
            return False

    rows = xgboost.DMatrix(FEATURES, labels)
    callbacks = [drawbar.xgboost.RayTrainReportCallback(frequency=1), Watch()]
    return drawbar.xgboost.train(XGBOOST, rows, ROUNDS, callbacks=callbacks).predict(rows)


def with_lightgbm(labels: Any, each_round: Callable[[int], None]) -> Predictions:
    rows = lightgbm.Dataset(FEATURES, labels)
    report = drawbar.lightgbm.RayTrainReportCallback(frequency=1)
    callbacks: list[Any] = [report, lambda env: each_round(env.iteration)]
    return drawbar.lightgbm.train(LIGHTGBM, rows, ROUNDS, callbacks=callbacks).predict(FEATURES)


@pytest.mark.parametrize("fails_in", [0, 1])
@pytest.mark.parametrize(
    ("trainer", "train", "train_alone"),
    [
        (drawbar.xgboost.XGBoostTrainer, with_xgboost, xgboost_alone),
        (drawbar.lightgbm.LightGBMTrainer, with_lightgbm, lightgbm_alone),
    ],
)
def test_repeated_trainings_do_not_resume_from_each_other(
    trainer: Any,
    train: Callable[..., Predictions],
    train_alone: Callable[[Any], Predictions],
    fails_in: int,
    tmp_path: Path,
) -> None:
    def function() -> tuple[list[Predictions], list[tuple[int, int]]]:
        rounds = []

        def trained(training: int) -> Predictions:
            def each_round(done: int) -> None:
                rounds.append((training, done))
                if (get_context().get_attempt(), *rounds[-1]) == (0, fails_in, 2):
                    raise RuntimeError("as it may happen")

            return train(FEATURES[:, training], each_round)

        return [trained(0), trained(1)], rounds

    result = trainer(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    predictions, rounds = result.return_value
    for training in (0, 1):
        alone = train_alone(FEATURES[:, training])
        np.testing.assert_allclose(predictions[training], alone, atol=1e-6)
    assert rounds[-1] == (1, ROUNDS - 1)
    # The first training resumes from its rounds, and starts from scratch after the second.
    assert (rounds[0] == (0, 0)) == (fails_in == 1)


@pytest.mark.parametrize(
    ("trainer", "params"),
    [
        (drawbar.xgboost.XGBoostTrainer, XGBOOST),
        (drawbar.lightgbm.LightGBMTrainer, LIGHTGBM),
    ],
)
def test_run_without_remaining_rounds_ends_with_model_and_metrics(
    trainer: Any, params: dict[str, Any], tmp_path: Path
) -> None:
    table = pd.DataFrame(FEATURES, columns=["a", "y"])
    arguments: dict[str, Any] = {
        "params": params,
        "label_column": "y",
        "datasets": {"train": table, "validation": table},
        "num_boost_round": ROUNDS,
        "scaling_config": ScalingConfig(num_workers=0),
        "run_config": RunConfig(storage_path=tmp_path),
    }
    first = trainer(**arguments).fit()
    again = trainer(**arguments, resume_from_checkpoint=first.checkpoint).fit()
    assert again.checkpoint.path != first.checkpoint.path
    assert again.metrics == first.metrics != {}
    predictions = [
        trainer.get_model(result.checkpoint).predict(
            xgboost.DMatrix(table[["a"]]) if params is XGBOOST else table[["a"]]
        )
        for result in (first, again)
    ]
    np.testing.assert_array_equal(*predictions)
