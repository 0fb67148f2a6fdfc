"""Objectives that average percentiles over workers, on rows that are sorted by their target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray.data
import xgboost

from drawbar.lightgbm import LightGBMTrainer, RayLGBMRegressor
from drawbar.train import DataConfig, RunConfig, ScalingConfig
from drawbar.xgboost import RayXGBRegressor, XGBoostTrainer

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data"),  # raised by Ray Data itself
]

TWO = ScalingConfig(num_workers=2)
ROUNDS, LEVEL = 50, 0.9
NAMES = list("abcde")
QUANTILE: dict[str, dict[str, Any]] = {
    "xgboost": {"objective": "reg:quantileerror", "quantile_alpha": LEVEL},
    "lightgbm": {"objective": "quantile", "alpha": LEVEL, "verbosity": -1},
}
MEDIAN: dict[str, dict[str, Any]] = {
    "xgboost": {"objective": "reg:absoluteerror", "learning_rate": 0.3},
    "lightgbm": {"objective": "mae", "verbosity": -1},
}
SORTED_DATASETS: dict[str, Any] = {
    "arrow": pa.Table.from_pandas,
    "ray": lambda frame: ray.data.from_pandas([frame[:6000], frame[6000:]]),
}


def make_frame(rows: int, seed: int) -> pd.DataFrame:
    """Make rows whose target has a wide and skewed distribution, sorted by the target."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(rng.normal(size=(rows, 5)), columns=NAMES).astype("float32")
    spread = 1 + frame.d.abs()
    frame["y"] = 3 * frame.a + frame.b * frame.c + 1.5 * spread * rng.gumbel(size=rows)
    return frame.sort_values("y", ignore_index=True)


TRAIN, HELD_OUT = make_frame(20_000, 0), make_frame(20_000, 1)


def pinball_loss(predictions: Any, level: float) -> float:
    missed = HELD_OUT.y - predictions
    return float(np.maximum(level * missed, (level - 1) * missed).mean())


def predict_alone(library: str, params: dict[str, Any]) -> Any:
    """Train the plain library in this process."""
    features, held_out = TRAIN[NAMES], HELD_OUT[NAMES]
    if library == "xgboost":
        matrix = xgboost.QuantileDMatrix(features, TRAIN.y)
        booster = xgboost.train(params, matrix, ROUNDS)
        return booster.predict(xgboost.DMatrix(held_out))
    dataset = lightgbm.Dataset(features, TRAIN.y)
    return lightgbm.train(params, dataset, ROUNDS).predict(held_out)


def fit(
    library: str, dataset: Any, params: dict[str, Any], run_config: RunConfig, **options: Any
) -> Any:
    """Train on two workers and return the predictions of the held-out rows."""
    trainer: Any = XGBoostTrainer if library == "xgboost" else LightGBMTrainer
    result = trainer(
        params=params,
        label_column="y",
        datasets={"train": dataset},
        num_boost_round=ROUNDS,
        scaling_config=TWO,
        run_config=run_config,
        **options,
    ).fit()
    held_out = HELD_OUT[NAMES]
    features = xgboost.DMatrix(held_out) if library == "xgboost" else held_out
    return trainer.get_model(result.checkpoint).predict(features)


@pytest.mark.parametrize(("library", "kind"), [("xgboost", "ray"), ("lightgbm", "arrow")])
def test_quantile_objective_on_sorted_rows_is_as_good_as_one_process(
    library: str, kind: str, run_config: RunConfig
) -> None:
    params = QUANTILE[library]
    predictions = fit(library, SORTED_DATASETS[kind](TRAIN), params, run_config)
    expected = pinball_loss(predict_alone(library, params), LEVEL)
    assert pinball_loss(predictions, LEVEL) < 1.02 * expected
    assert np.mean(predictions >= HELD_OUT.y) == pytest.approx(LEVEL, abs=0.03)


@pytest.mark.parametrize(
    ("library", "regressor"),
    [
        pytest.param("xgboost", RayXGBRegressor, marks=pytest.mark.nightly),
        ("lightgbm", RayLGBMRegressor),
    ],
)
def test_estimator_with_mae_objective_on_sorted_rows_is_as_good_as_one_process(
    library: str, regressor: Any
) -> None:
    params = MEDIAN[library]
    model = regressor(n_estimators=ROUNDS, scaling_config=TWO, **params)
    model.fit(TRAIN[NAMES], TRAIN.y)
    expected = pinball_loss(predict_alone(library, params), 0.5)
    assert pinball_loss(model.predict(HELD_OUT[NAMES]), 0.5) < 1.02 * expected


def test_weights_and_margins_follow_their_rows_when_rows_are_shuffled(
    run_config: RunConfig,
) -> None:
    """Rows with a weight have their target as margin; the others have a wrong margin."""
    frame = TRAIN.assign(weight=(TRAIN.index % 2).astype("float32"), margin=TRAIN.y)
    frame.loc[frame.weight == 0, "margin"] = 1e6
    predictions = fit(
        "xgboost",
        frame,
        QUANTILE["xgboost"],
        run_config,
        weight_column="weight",
        base_margin_column="margin",
    )
    base_score = np.median(predictions)
    assert np.abs(predictions - base_score).max() < 0.01  # nothing was left to learn


def test_own_dataset_config_without_shuffle_warns_for_quantile_objective(tmp_path: Path) -> None:
    config = DataConfig(datasets_to_split="all", uneven_rows="keep")
    with pytest.warns(UserWarning, match=r"needs a random sample.*datasets_to_shuffle"):
        XGBoostTrainer(
            params=QUANTILE["xgboost"],
            label_column="y",
            datasets={"train": TRAIN},
            dataset_config=config,
            scaling_config=TWO,
            run_config=RunConfig(storage_path=tmp_path),
        )
