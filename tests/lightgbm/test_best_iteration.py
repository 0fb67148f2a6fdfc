"""The newest checkpoint of a LightGBM run contains the best iteration of early stopping."""

from __future__ import annotations

from pathlib import Path

import lightgbm
import numpy as np
import pandas as pd
import pytest

from drawbar.lightgbm import LightGBMTrainer, RayTrainReportCallback
from drawbar.train import FailureConfig, RunConfig, ScalingConfig, get_context

FATAL_ROUND = 6


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("fails", [False, True])
def test_checkpoint_of_every_round_has_best_iteration(tmp_path: Path, fails: bool) -> None:
    draw = np.random.default_rng(0)
    rows = pd.DataFrame(draw.normal(size=(300, 4)), columns=list("abcd"))
    rows["y"] = rows["a"] + draw.normal(size=300)
    params = {"objective": "regression", "learning_rate": 0.5, "verbosity": -1, "num_threads": 1}

    def fail_once(evaluations: dict[str, list[float]]) -> dict[str, float]:
        if (
            fails
            and len(evaluations["valid-l2"]) == FATAL_ROUND
            and not get_context().get_attempt()
        ):
            raise ConnectionError
        return {name: values[-1] for name, values in evaluations.items()}

    reports = RayTrainReportCallback(frequency=1, results_postprocessing_fn=fail_once)
    trainer = LightGBMTrainer(
        params=params,
        label_column="y",
        num_boost_round=40,
        datasets={"train": rows[:200], "valid": rows[200:]},
        callbacks=[lightgbm.early_stopping(4, verbose=False), reports],
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name="run", storage_path=tmp_path, failure_config=FailureConfig(max_failures=1)
        ),
    )
    result = trainer.fit()
    assert result.checkpoint is not None
    booster = LightGBMTrainer.get_model(result.checkpoint)
    scores = result.metrics_dataframe["valid-l2"]
    assert booster.best_iteration == scores.argmin() + 1 < booster.num_trees()
    predicted = booster.predict(rows[200:].drop(columns="y"))
    assert np.mean((predicted - rows["y"][200:]) ** 2) == pytest.approx(scores.min())
