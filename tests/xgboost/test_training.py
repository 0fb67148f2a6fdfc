"""Several workers train the same model as one process of plain XGBoost.

Features have few distinct values throughout: there all sketches agree on the bins, so that the
trees must be the same to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import xgboost
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from xgboost import DMatrix, QuantileDMatrix

import drawbar.xgboost
from drawbar.train import RunConfig, TrainingFailedError, runs
from drawbar.train.testing import run_in_threads
from drawbar.xgboost import XGBoostConfig, allreduce_metric

if TYPE_CHECKING:
    from tests.xgboost.conftest import FitInThreads


def coarse(frame: pd.DataFrame) -> pd.DataFrame:
    """Reduce each feature to eight distinct values."""
    return frame.apply(lambda c: pd.qcut(c, 8, labels=False, duplicates="drop")).astype("float32")


def shuffled(load: Any) -> pd.DataFrame:
    features, target = load(return_X_y=True, as_frame=True)
    return coarse(features).assign(target=target).sample(frac=1, random_state=0)


@pytest.fixture(scope="module")
def cancer() -> pd.DataFrame:
    frame = shuffled(load_breast_cancer)
    twins = [name for name in frame if "perimeter" in name or "area" in name]
    return frame.drop(columns=twins)  # of the radius: of two equal splits either may be taken


@pytest.fixture(scope="module")
def diabetes() -> pd.DataFrame:
    return shuffled(load_diabetes)


def split(frame: pd.DataFrame, *cuts: int) -> list[pd.DataFrame]:
    return [frame.iloc[a:b] for a, b in zip((0, *cuts), (*cuts, len(frame)), strict=True)]


def matrix(frame: pd.DataFrame, *, drop: tuple[str, ...] = (), **more: Any) -> QuantileDMatrix:
    features = frame.drop(columns=["target", *drop])
    return QuantileDMatrix(features, frame.target, enable_categorical=True, **more)


def plain(
    params: dict[str, Any],
    train: DMatrix,
    rounds: int,
    *,
    valid: DMatrix | None = None,
    **more: Any,
) -> xgboost.Booster:
    """Train as one would without Drawbar."""
    evals = [(train, "train"), *([(valid, "validation")] if valid else [])]
    params = {"nthread": 1, "seed_per_iteration": True, **params}
    return xgboost.train(params, train, rounds, evals=evals, verbose_eval=False, **more)


@pytest.mark.parametrize("cuts", [(200,), (5, 300)], ids=["2 workers", "3 unequal workers"])
def test_sharded_validation_stops_all_ranks_on_the_round_of_one_process(
    fit_in_threads: FitInThreads, cancer: pd.DataFrame, cuts: tuple[int, ...]
) -> None:
    training, validation = cancer[:400], cancer[400:]
    params = {"objective": "binary:logistic", "eval_metric": "logloss", "eta": 0.8, "max_depth": 4}
    parts = {
        "train": split(training, *cuts),
        "validation": split(validation, *(c // 4 for c in cuts)),
    }
    booster, result = fit_in_threads(parts, params, num_boost_round=60, early_stopping_rounds=4)
    train = matrix(training)
    valid = matrix(validation, ref=train)
    history: Any = {}
    expected = plain(params, train, 60, valid=valid, early_stopping_rounds=4, evals_result=history)
    assert booster.num_boosted_rounds() == expected.num_boosted_rounds() < 60
    assert booster.best_iteration == expected.best_iteration
    assert (booster.predict(valid) == expected.predict(valid)).all()
    frame = result.metrics_dataframe
    last = frame[frame["index"] == expected.num_boosted_rounds() - 1]
    assert last["validation-logloss"].nunique() == 1  # the same number on every rank
    assert last["validation-logloss"].iloc[0] == pytest.approx(
        history["validation"]["logloss"][-1], abs=1e-12
    )


@pytest.mark.parametrize(
    "params",
    [
        {"booster": "dart", "rate_drop": 0.3, "seed": 3},
        {"num_parallel_tree": 4, "colsample_bynode": 0.5, "eta": 1},
        {"colsample_bytree": 0.4, "max_depth": 3},
    ],
    ids=["dart", "random forest", "column sampling"],
)
def test_boosters_equal_those_of_one_process(
    fit_in_threads: FitInThreads, diabetes: pd.DataFrame, params: dict[str, Any]
) -> None:
    booster, result = fit_in_threads({"train": split(diabetes, 100)}, params, num_boost_round=8)
    progress = runs.find_run(result.path).progress
    assert progress is not None
    assert (progress.done, progress.total, progress.unit) == (8, 8, "rounds")
    train = matrix(diabetes)
    expected = plain(params, train, 8).predict(train)
    np.testing.assert_allclose(booster.predict(train), expected, rtol=1e-6)


def test_multi_class_equals_one_process(fit_in_threads: FitInThreads) -> None:
    pixels, target = load_digits(return_X_y=True, as_frame=True)
    digits = pixels.assign(target=target)[:600]
    params = {"objective": "multi:softprob", "num_class": 10, "eval_metric": "mlogloss"}
    booster, _ = fit_in_threads({"train": split(digits, 250)}, params, num_boost_round=5)
    train = matrix(digits)
    assert np.abs(booster.predict(train) - plain(params, train, 5).predict(train)).max() < 1e-6


@pytest.mark.parametrize("strategy", ["one_output_per_tree", "multi_output_tree"])
def test_several_outputs_equal_one_process(
    fit_in_threads: FitInThreads, diabetes: pd.DataFrame, strategy: str
) -> None:
    frame = diabetes.assign(other=-2 * diabetes.target + diabetes.bmi)
    params = {"objective": "reg:squarederror", "multi_strategy": strategy, "tree_method": "hist"}
    booster, result = fit_in_threads(
        {"train": split(frame, 100, 100)},
        params,
        label_column=["target", "other"],
        num_boost_round=5,
    )
    features = frame.drop(columns=["target", "other"])
    train = QuantileDMatrix(features, frame[["target", "other"]])
    expected = plain(params, train, 5).predict(train)
    assert expected.shape == (len(frame), 2)
    np.testing.assert_allclose(booster.predict(train), expected, rtol=1e-5)
    assert result.metrics is not None
    assert result.metrics["train-rmse"] > 0


def test_missing_values_weights_and_base_margins(
    fit_in_threads: FitInThreads, cancer: pd.DataFrame
) -> None:
    rng = np.random.default_rng(0)
    holes = cancer.mask(rng.random(cancer.shape) < 0.2).assign(target=cancer.target)
    weight = pd.Series(rng.integers(1, 4, len(holes)), index=holes.index)
    margin = pd.Series(rng.integers(-1, 2, len(holes)).astype(float), index=holes.index)
    params = {"objective": "binary:logistic"}
    booster, _ = fit_in_threads(
        {"train": split(holes.assign(w=weight, m=margin), 300)},
        params,
        weight_column="w",
        base_margin_column="m",
        num_boost_round=6,
    )
    train = matrix(holes, weight=weight, base_margin=margin)
    expected = plain(params, train, 6).predict(train)
    np.testing.assert_allclose(booster.predict(train), expected, rtol=1e-5)


def test_category_on_one_rank_is_merged(
    fit_in_threads: FitInThreads, diabetes: pd.DataFrame
) -> None:
    place = np.where(np.arange(len(diabetes)) < 100, "sea", "hill")
    place[400:] = "moor"
    frame = diabetes.assign(place=place, kind=np.arange(len(diabetes)) % 5)
    params = {"max_depth": 3, "max_cat_to_onehot": 1}
    booster, _ = fit_in_threads(
        {"train": split(frame, 100, 400)}, params, categorical_features=["place", "kind"]
    )
    categories = {"place": "category", "kind": "category"}
    train = matrix(frame.astype(categories))
    np.testing.assert_allclose(
        booster.predict(train), plain(params, train, 10).predict(train), rtol=1e-5
    )
    assert booster.feature_types is not None
    assert booster.feature_types[-2:] == ["c", "c"]
    elsewhere = frame[100:101].astype(
        {"place": "category", "kind": "category"}
    )  # "hill" has code 0
    alone = booster.predict(DMatrix(elsewhere.drop(columns="target"), enable_categorical=True))
    np.testing.assert_allclose(alone, booster.predict(train)[100:101], rtol=1e-6)


def test_three_workers_train_on_two_rows(fit_in_threads: FitInThreads) -> None:
    rows = pd.DataFrame({"a": [0.0, 1.0], "c": pd.Categorical(["x", "y"]), "target": [0.0, 1.0]})
    params = {"min_child_weight": 0, "reg_lambda": 0, "eta": 1, "base_score": 0.5}
    parts = {"train": split(rows, 0, 1), "validation": split(rows, 2, 2)}
    booster, result = fit_in_threads(parts, params, num_boost_round=3)
    metrics = result.metrics or {}
    assert booster.predict(matrix(rows)).tolist() == [0.0, 1.0]
    assert metrics["validation-rmse"] == 0.0


def test_ranking_with_whole_queries(fit_in_threads: FitInThreads) -> None:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(rng.integers(0, 8, (400, 5)), columns=list("abcde")).astype("float32")
    frame["query"] = np.repeat(np.arange(40), 10)
    frame["w"] = frame["query"] % 2 + 1.0
    frame["target"] = (frame.a + rng.normal(size=400) > 5).astype(int) + (frame.b > 5)
    params = {
        "objective": "rank:ndcg",
        "eval_metric": "ndcg@5",
        "lambdarank_pair_method": "topk",
        "max_depth": 3,
    }
    booster, result = fit_in_threads(
        {"train": split(frame, 0, 160)}, params, group_column="query", weight_column="w"
    )
    metrics = result.metrics or {}
    weights = frame.groupby("query").w.first()
    train = matrix(frame, drop=("query", "w"), qid=frame["query"], weight=weights)
    expected = plain(params, train, 10).predict(train)
    np.testing.assert_allclose(booster.predict(train), expected, atol=1e-5)
    booster.set_param({"eval_metric": "ndcg@5"})
    evaluation = booster.eval(train, name="train")  # one process, the same trees
    assert float(evaluation.rpartition(":")[2]) == pytest.approx(metrics["train-ndcg@5"], abs=1e-6)
    assert metrics["train-ndcg@5"] > 0.9


@pytest.mark.parametrize(
    ("objective", "weights", "message"),
    [
        ("rank:ndcg", [0.01, 1.0], "means are 0.01, 1. Set num_workers=1"),
        ("rank:pairwise", [0.0, 1.0], "means are 0, 1. Set num_workers=1"),
        ("reg:absoluteerror", [0.0, 1.0], "worker 0 of 2 has no row of positive weight"),
        ("reg:quantileerror", [1.0, 0.0], "worker 1 of 2 has no row of positive weight"),
    ],
)
def test_weights_that_xgboost_ignores_across_workers_raise(
    fit_in_threads: FitInThreads, objective: str, weights: list[float], message: str
) -> None:
    frame = pd.DataFrame({"a": np.arange(40) % 7, "target": np.arange(40) % 2})
    frame["w"], frame["query"] = np.repeat(weights, 20), np.arange(40) // 10
    roles = {"weight_column": "w", "group_column": "query"}
    if not objective.startswith("rank:"):
        del frame["query"], roles["group_column"]
    params = {"objective": objective, "quantile_alpha": 0.5}
    with pytest.raises(TrainingFailedError, match=message):
        fit_in_threads({"train": split(frame, 20)}, params, **roles)


def test_more_workers_than_rows_of_percentile_objective_raise(fit_in_threads: FitInThreads) -> None:
    rows = pd.DataFrame({"a": [0.0, 1.0], "target": [0.0, 1.0]})
    with pytest.raises(TrainingFailedError, match="Set num_workers to at most 2"):
        fit_in_threads({"train": split(rows, 1, 2)}, {"objective": "reg:absoluteerror"})


def test_cox_objective_in_training_function_of_several_workers_raises(
    run_config: RunConfig,
) -> None:
    def function() -> None:
        data = DMatrix(np.arange(20.0).reshape(10, 2), np.arange(10.0) + 1)
        drawbar.xgboost.train({"objective": "survival:cox"}, data)

    with pytest.raises(TrainingFailedError, match=r"found 2 workers\. Set num_workers=1"):
        run_in_threads(function, backend_config=XGBoostConfig(), run_config=run_config)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"eval_metric": ["rmse", "ndcg@5-"]}, r"'ndcg' ranks all rows .* set num_workers=1"),
        ({"eval_metric": "map"}, "'map' ranks all rows"),
        ({"eval_metric": "cox-nloglik"}, r"found 2 workers\. Set num_workers=1, or remove it"),
        ({"objective": "rank:ndcg"}, "'rank:ndcg' ranks all rows of data without queries"),
    ],
)
def test_metric_that_needs_rows_of_other_workers_raises(
    params: dict[str, Any], message: str, run_config: RunConfig
) -> None:
    def function() -> None:
        data = DMatrix(np.arange(20.0).reshape(10, 2), np.arange(10.0) % 2)
        drawbar.xgboost.train(params, data, evals=[(data, "train")])

    with pytest.raises(TrainingFailedError, match=message):
        run_in_threads(function, backend_config=XGBoostConfig(), run_config=run_config)


def test_mean_of_areas_under_curve_is_a_warning(
    fit_in_threads: FitInThreads, cancer: pd.DataFrame
) -> None:
    params = {"objective": "binary:logistic", "eval_metric": ["auc", "logloss"]}
    with pytest.warns(UserWarning, match="'auc' is the mean of the workers' values") as warned:
        fit_in_threads({"train": split(cancer, 200)}, params)
    assert len(warned) == 1


def test_rows_of_weight_zero_do_not_count_for_percentile_objective(
    fit_in_threads: FitInThreads, diabetes: pd.DataFrame
) -> None:
    weighted = diabetes.assign(w=np.arange(len(diabetes)) % 2)
    weighted.loc[weighted.w == 0, "target"] = 1e6
    parts = split(weighted, 200)
    params = {"objective": "reg:absoluteerror"}
    booster, _ = fit_in_threads({"train": parts}, params, weight_column="w")
    chosen = [part[part.w > 0] for part in parts]
    expected, _ = fit_in_threads({"train": chosen}, params, weight_column="w")
    features = DMatrix(diabetes.drop(columns="target"))
    np.testing.assert_allclose(booster.predict(features), expected.predict(features), rtol=1e-6)


def test_queries_of_several_blocks_equal_one_process(fit_in_threads: FitInThreads) -> None:
    number = np.arange(600_000)  # two blocks, which cut a query
    frame = pd.DataFrame({"a": number % 97, "b": number // 7 % 31}).astype("float32")
    frame["query"], frame["target"] = number // 7, number % 3
    params = {"objective": "rank:pairwise", "max_depth": 3}
    booster, _ = fit_in_threads({"train": [frame]}, params, group_column="query", num_boost_round=2)
    train = matrix(frame, drop=("query",), qid=frame["query"])
    expected = plain(params, train, 2).predict(train)
    assert np.abs(booster.predict(train) - expected).max() < 1e-6
    assert expected.std() > 0


def test_external_memory_gives_the_same_model(
    fit_in_threads: FitInThreads, cancer: pd.DataFrame, tmp_path: Any
) -> None:
    params = {"objective": "binary:logistic"}
    parts = {"train": split(cancer, 200)}
    booster, _ = fit_in_threads(parts, params, external_memory=str(tmp_path))
    in_memory, _ = fit_in_threads(parts, params)
    train = matrix(cancer)
    assert (booster.predict(train) == in_memory.predict(train)).all()
    assert [path.name for path in tmp_path.iterdir() if "drawbar-" in path.name] == []


def squared(predictions: np.ndarray[Any, Any], data: DMatrix) -> Any:
    return predictions - data.get_label(), np.ones_like(predictions)


def mean_error(predictions: np.ndarray[Any, Any], data: DMatrix) -> tuple[str, float]:
    errors = np.abs(predictions - data.get_label())
    return "error", allreduce_metric(float(errors.sum()), len(errors))


def test_custom_objective_and_metric_are_of_all_rows(
    fit_in_threads: FitInThreads, diabetes: pd.DataFrame
) -> None:
    booster, result = fit_in_threads(
        {"train": split(diabetes, 40)},
        {"disable_default_eval_metric": True},
        obj=squared,
        custom_metric=mean_error,
    )
    metrics = result.metrics or {}
    train = matrix(diabetes)
    expected = plain({}, train, 10, obj=squared)
    np.testing.assert_allclose(booster.predict(train), expected.predict(train), rtol=1e-5)
    error = np.abs(booster.predict(train) - diabetes.target).mean()
    assert metrics["train-error"] == pytest.approx(error, rel=1e-6)


def test_continuous_features_lose_nothing_on_held_out_rows(fit_in_threads: FitInThreads) -> None:
    """Sketches and bins differ, but the loss is about the same."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(6000, 6)), columns=list("abcdef")).astype("float32")
    odds = 2 * frame.a + frame.b * frame.c
    frame["target"] = (rng.random(6000) < 1 / (1 + np.exp(-odds))).astype(int)
    training, held_out = frame[:4000], frame[4000:]
    params = {"objective": "binary:logistic", "eta": 0.2, "max_depth": 4}
    booster, _ = fit_in_threads({"train": split(training, 1500)}, params, num_boost_round=30)
    expected = plain(params, matrix(training), 30)

    def loss(model: xgboost.Booster) -> float:
        p = model.predict(DMatrix(held_out.drop(columns="target")))
        return float(-np.log(np.where(held_out.target == 1, p, 1 - p)).mean())

    assert loss(booster) == pytest.approx(loss(expected), rel=0.02)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_missing_base_margin_in_training_function_raises(
    run_config: RunConfig, value: float
) -> None:
    """XGBoost itself would train no trees."""

    def function() -> None:
        margin = np.array([0.5, value, 0.5])
        valid = DMatrix(np.eye(3), np.arange(3.0), base_margin=margin)
        data = DMatrix(np.eye(3), np.arange(3.0), base_margin=np.ones(3))
        drawbar.xgboost.train({}, data, evals=[(valid, "valid")])

    with pytest.raises(TrainingFailedError, match="1 of 3 values in the base_margin of valid"):
        run_in_threads(
            function, num_workers=1, backend_config=XGBoostConfig(), run_config=run_config
        )
