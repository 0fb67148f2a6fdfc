"""Parity with the plain estimators: equal results or a clear error."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray
import scipy.sparse  # type: ignore[import-untyped]
import xgboost
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer

from drawbar.lightgbm import LightGBMTrainer, RayLGBMClassifier, RayLGBMRegressor
from drawbar.lightgbm import predict as predict_with_lightgbm
from drawbar.train import RunConfig, ScalingConfig
from drawbar.xgboost import RayXGBClassifier, RayXGBRanker, RayXGBRegressor, XGBoostTrainer
from drawbar.xgboost import predict as predict_with_xgboost

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data"),  # it warns of itself
    pytest.mark.filterwarnings("ignore:The argument 'eval_set' is deprecated"),
]

HERE: dict[str, Any] = {"n_estimators": 8, "scaling_config": ScalingConfig(num_workers=0)}
TWO: dict[str, Any] = {"n_estimators": 8, "scaling_config": ScalingConfig(num_workers=2)}
PLAIN: dict[str, Any] = {"n_estimators": 8}
QUIET: dict[str, Any] = {"verbosity": -1}


@pytest.fixture
def rows() -> tuple[Any, Any]:
    """Create features and correlated labels whose values float32 represents exactly."""
    random = np.random.default_rng(0)
    x = random.normal(size=(600, 4)).astype(np.float32).astype(np.float64)
    return x, (x[:, 0] + x[:, 1] ** 2 > 1).astype(int)


def close(left: Any, right: Any) -> Any:
    return np.asarray(left) == pytest.approx(np.asarray(right), abs=1e-4)


def predictions(dataset: Any) -> Any:
    return np.stack(dataset.to_pandas()["prediction"].to_numpy())


@pytest.mark.parametrize("classifier", [RayLGBMClassifier, RayXGBClassifier])
def test_estimator_fit_in_named_run_starts_from_scratch(
    classifier: Any, rows: Any, tmp_path: Path
) -> None:
    x, y = rows
    model = classifier(**HERE, run_config=RunConfig(name="fit", storage_path=tmp_path))
    assert model.fit(x, y).score(x, y) > 0.9
    assert model.fit(x, 1 - y).score(x, 1 - y) > 0.9
    assert len(list(tmp_path.glob("fit_*/journal.jsonl"))) == 2


@pytest.mark.parametrize(
    ("missing", "kind"), [(-999, "float64"), (-99.9, "float32"), (-3.0, "int64"), (0.0, "bool")]
)
def test_xgboost_a_value_that_means_missing(rows: Any, missing: float, kind: str) -> None:
    x, y = rows
    x[::3, 0] = missing
    x = x.astype(kind)
    if kind == "int64":
        x[0, 1] = 2**60
    ours = RayXGBClassifier(**HERE, missing=missing).fit(x, y)
    plain = xgboost.XGBClassifier(**PLAIN, missing=missing).fit(x, y)
    assert close(ours.predict_proba(x), plain.predict_proba(x))


@pytest.mark.nightly
def test_xgboost_missing_values_of_a_ray_dataset_are_nulls() -> None:
    with pytest.raises(ValueError, match="missing=-999 is not supported with a Ray Dataset"):
        RayXGBClassifier(missing=-999).fit(ray.data.from_items([{"a": 1.0, "y": 0}]), "y")


def test_xgboost_what_a_sparse_matrix_leaves_out_is_missing(rows: Any) -> None:
    x, y = rows
    sparse = scipy.sparse.csr_matrix(np.where(np.abs(x) > 0.5, x, 0))
    ours = RayXGBClassifier(**HERE).fit(sparse, y)
    plain = xgboost.XGBClassifier(**PLAIN).fit(sparse, y)
    assert close(ours.predict_proba(sparse), plain.predict_proba(sparse))


def test_lightgbm_what_a_sparse_matrix_leaves_out_is_zero(rows: Any) -> None:
    x, y = rows
    sparse = scipy.sparse.csr_matrix(np.where(np.abs(x) > 0.5, x, 0))
    ours = RayLGBMClassifier(**HERE, **QUIET).fit(sparse, y)
    plain = lightgbm.LGBMClassifier(**PLAIN, **QUIET).fit(sparse, y)
    assert close(ours.predict_proba(sparse), plain.predict_proba(sparse))


def test_xgboost_feature_types(rows: Any) -> None:
    x, _ = rows
    x[:, 0] = np.arange(600) % 7
    y = np.isin(x[:, 0], [1, 4, 5]) + 0.1 * x[:, 1]
    options: dict[str, Any] = {"feature_types": ["c", "q", "q", "q"], "enable_categorical": True}
    options["max_cat_to_onehot"] = 1
    ours = RayXGBRegressor(**HERE, **options).fit(x, y)
    plain = xgboost.XGBRegressor(**PLAIN, **options).fit(x, y)
    assert close(ours.predict(x), plain.predict(x))
    assert ours.score(x, y) > 0.8


def test_xgboost_an_objective_of_ones_own_still_gives_probabilities(rows: Any) -> None:
    x, y = rows

    def logistic(truth: Any, scores: Any) -> tuple[Any, Any]:
        found = 1 / (1 + np.exp(-scores))
        return found - truth, found * (1 - found)

    ours = RayXGBClassifier(**HERE, objective=logistic, base_score=0.5).fit(x, y)
    plain = xgboost.XGBClassifier(**PLAIN, objective=logistic, base_score=0.5).fit(x, y)
    assert close(ours.predict_proba(x), plain.predict_proba(x))
    assert np.array_equal(ours.predict(x), plain.predict(x))


@pytest.mark.parametrize("numbers", [range(6), [1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize("regressor", [RayLGBMRegressor, RayXGBRegressor])
def test_categories_that_are_integers(regressor: Any, numbers: Any) -> None:
    random = np.random.default_rng(0)
    kind = np.asarray(list(numbers))[random.integers(0, 6, 600)]
    x = pd.DataFrame({"kind": pd.Categorical(kind), "x": random.normal(size=600)})
    y = np.isin(kind, [2, 5]) + 0.1 * x["x"]
    options: dict[str, Any] = {"enable_categorical": True}
    plain: Any = xgboost.XGBRegressor(**PLAIN, **options)
    if regressor is RayLGBMRegressor:
        options = QUIET
        plain = lightgbm.LGBMRegressor(**PLAIN, **options)
    ours = regressor(**HERE, **options).fit(x, y)
    plain.fit(x, y)
    some = x[np.isin(kind, [2, 5])].assign(
        kind=lambda each: each["kind"].cat.remove_unused_categories()
    )
    assert close(ours.predict(x), plain.predict(x))
    assert close(ours.predict(some), plain.predict(some))


@pytest.mark.parametrize(
    ("classifier", "classes"),
    [
        pytest.param(RayLGBMClassifier, 2, marks=pytest.mark.nightly),
        (RayXGBClassifier, 3),
    ],
)
def test_predictions_of_ray_dataset_match_table(classifier: Any, classes: int) -> None:
    features, _ = load_breast_cancer(return_X_y=True, as_frame=True)  # with spaces in their names
    kind = np.random.default_rng(0).integers(0, 6, len(features))
    frame = features.iloc[:, :4].assign(kind=pd.Categorical(kind))
    y = pd.qcut(frame["mean radius"], classes, labels=False) + np.isin(kind, [2, 4])
    y = np.array(["yes", "no", "yes"])[y] if classifier is RayLGBMClassifier else y % classes
    model = classifier(**HERE).fit(frame, y)
    some = frame[np.isin(kind, [2, 5])]
    dataset = ray.data.from_pandas(some.assign(kind=some["kind"].cat.remove_unused_categories()))
    assert np.array_equal(predictions(model.predict(dataset)), model.predict(some))
    probabilities = model.predict_proba(some)
    if classifier is RayLGBMClassifier:
        predicted = predict_with_lightgbm(model.booster_, dataset)
        assert close(predictions(predicted), probabilities[:, 1])
    else:
        predicted = predict_with_xgboost(model.get_booster(), dataset)
        assert close(predictions(predicted), probabilities)


@pytest.mark.parametrize(
    "library", ["xgboost", pytest.param("lightgbm", marks=pytest.mark.nightly)]
)
def test_predict_of_arrow_dataset_with_all_types_matches_training(
    library: str, run_config: RunConfig
) -> None:
    number = np.arange(400)
    gaps = number % 7 == 0
    table = pa.table(
        {
            "exact": pa.array(number).cast(pa.decimal128(30, 2)),
            "flag": [None if gap else bool(i % 3) for i, gap in zip(number, gaps, strict=True)],
            "null": pa.nulls(400),
            "place": np.array(["sea", "hill"])[number % 2],
            "kind": number % 5,
            "y": number / 400 + 3 * (number % 2) + 2 * np.isin(number % 5, [1, 4]),
        }
    )
    trainer: Any = XGBoostTrainer if library == "xgboost" else LightGBMTrainer
    result = trainer(
        params={} if library == "xgboost" else QUIET,
        label_column="y",
        datasets={"train": table},
        num_boost_round=60,
        categorical_features=["place", "kind"],
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    ).fit()
    predict = predict_with_xgboost if library == "xgboost" else predict_with_lightgbm
    predicted = predict(trainer.get_model(result.checkpoint), ray.data.from_arrow(table))
    found = predicted.to_pandas()
    assert np.abs(found["prediction"] - found["y"]).mean() < 0.2


def test_predict_of_ray_dataset_applies_options_and_logs_no_warning(
    rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = rows
    frame = pd.DataFrame(x, columns=list("abcd"))
    model = RayXGBClassifier(**HERE).fit(frame, y)
    logger = logging.getLogger("ray.data")
    logger.addHandler(caplog.handler)  # Ray Data's logger does not propagate to the root
    try:
        scores = predictions(model.predict(ray.data.from_pandas(frame), output_margin=True))
    finally:
        logger.removeHandler(caplog.handler)
    assert close(scores, model.predict(frame, output_margin=True))
    assert "deprecated" not in caplog.text


def test_lightgbm_training_rows_among_those_to_evaluate(rows: Any) -> None:
    x, y = rows
    weight = np.where(y, 1.0, 5.0)
    fit: dict[str, Any] = {
        "sample_weight": weight,
        "eval_set": [(x, y), (x[:200], 1 - y[:200])],
        "eval_names": ["train", "valid"],
        "eval_metric": "auc",
    }
    ours = RayLGBMClassifier(**HERE, **QUIET)
    ours.fit(x, y, callbacks=[lightgbm.early_stopping(5, verbose=False)], **fit)
    plain = lightgbm.LGBMClassifier(**PLAIN, **QUIET)
    plain.fit(x, y, callbacks=[lightgbm.early_stopping(5, verbose=False)], **fit)
    assert close(ours.predict_proba(x), plain.predict_proba(x))
    assert ours.best_iteration_ == plain.best_iteration_
    assert {name: set(found) for name, found in ours.evals_result_.items()} == {
        name: set(found) for name, found in plain.evals_result_.items()
    }
    for name, found in plain.evals_result_.items():
        for metric, values in found.items():
            assert close(ours.evals_result_[name][metric], values)


def test_lightgbm_goes_on_from_a_model_with_early_stopping(rows: Any) -> None:
    x, y = rows
    fit: dict[str, Any] = {"eval_set": [(x[:200], 1 - y[:200])]}
    plain = lightgbm.LGBMClassifier(**PLAIN, **QUIET).fit(x, y)
    ours = RayLGBMClassifier(**HERE, **QUIET)
    ours.fit(x, y, init_model=plain, callbacks=[lightgbm.early_stopping(3, verbose=False)], **fit)
    again = lightgbm.LGBMClassifier(**PLAIN, **QUIET)
    again.fit(x, y, init_model=plain, callbacks=[lightgbm.early_stopping(3, verbose=False)], **fit)
    assert ours.best_iteration_ == again.best_iteration_ == 9
    assert close(
        ours.evals_result_["valid_0"]["binary_logloss"],
        again.evals_result_["valid_0"]["binary_logloss"],
    )


def test_lightgbm_init_model_selects_the_same_rows_and_features(rows: Any) -> None:
    x, y = rows
    options = {"subsample": 0.6, "subsample_freq": 1, "colsample_bytree": 0.6, **QUIET}
    first = lightgbm.LGBMClassifier(**PLAIN, **options).fit(x, y)
    ours = RayLGBMClassifier(**HERE, **options).fit(x, y, init_model=first)
    plain = lightgbm.LGBMClassifier(**PLAIN, **options).fit(x, y, init_model=first)
    assert close(ours.predict_proba(x), plain.predict_proba(x))


def test_lightgbm_weights_of_classes_by_name(rows: Any) -> None:
    x, y = rows
    names = np.where(y, "yes", "no")
    fit: dict[str, Any] = {
        "eval_set": [(x[:200], names[:200])],
        "eval_class_weight": [{"yes": 5, "no": 1}],
    }
    ours = RayLGBMClassifier(**HERE, **QUIET).fit(x, names, **fit)
    plain = lightgbm.LGBMClassifier(**PLAIN, **QUIET).fit(x, names, **fit)
    (found,), (expected,) = (each.evals_result_["valid_0"].values() for each in (ours, plain))
    assert close(found, expected)


def test_lightgbm_bins_doubles_as_doubles() -> None:
    moment = (1.7e9 + np.arange(600)).reshape(-1, 1)  # float32 has 128 s between two of them
    y = np.sin(np.arange(600) / 40)
    ours = RayLGBMRegressor(**TWO, **QUIET).fit(moment, y)
    plain = lightgbm.LGBMRegressor(**PLAIN, **QUIET).fit(moment, y)
    assert close(ours.predict(moment), plain.predict(moment))


def test_lightgbm_columns_of_all_types() -> None:
    numbers = list(range(100))
    table = pa.table(
        {
            "null": pa.nulls(100),
            "flag": [number % 3 == 0 for number in numbers],
            "small": pa.array(numbers, pa.int8()),
            "exact": pa.array(numbers).cast(pa.decimal128(30, 2)),
            "gaps": [None if number % 7 == 0 else number for number in numbers],
        }
    )
    model = RayLGBMRegressor(**HERE, **QUIET).fit(table, numbers)
    frame = table.to_pandas().astype(float)
    assert model.score(frame, numbers) > 0.5


def test_lightgbm_negative_categories_are_missing(rows: Any) -> None:
    x, y = rows
    x[:, 0] = np.arange(600) % 5 - 1
    ours = RayLGBMClassifier(**HERE, **QUIET).fit(x, y, categorical_feature=[0])
    plain = lightgbm.LGBMClassifier(**PLAIN, **QUIET).fit(x, y, categorical_feature=[0])
    assert close(ours.predict_proba(x), plain.predict_proba(x))


@pytest.mark.parametrize("classifier", [RayLGBMClassifier, RayXGBClassifier])
def test_columns_of_rows_to_evaluate_are_found_by_name(classifier: Any, rows: Any) -> None:
    x, y = rows
    frame = pd.DataFrame(x, columns=list("abcd"))
    turned = frame[list("dcba")]
    model = classifier(**HERE).fit(frame, y, eval_set=[(turned, y), (frame.copy(), y)])
    evaluated = model.evals_result_ if classifier is RayLGBMClassifier else model.evals_result()
    left, right = evaluated.values()
    assert left == right
    with pytest.raises(ValueError, match="have 3 features, but the training rows have 4"):
        clone(model).fit(x, y, eval_set=[(x[:, :3], y)])


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (RayXGBRegressor, xgboost.XGBRegressor),
        pytest.param(RayXGBClassifier, xgboost.XGBClassifier, marks=pytest.mark.nightly),
    ],
)
def test_xgboost_several_outputs_and_weights_of_features(ours: Any, plain: Any, rows: Any) -> None:
    x, y = rows
    frame = pd.DataFrame(x, columns=list("abcd"))
    both = pd.DataFrame({"y": y, "z": (x[:, 2] > 0).astype(int)})
    options: dict[str, Any] = {
        "feature_weights": [0.0, 1.0, 2.0, 3.0],
        "colsample_bynode": 0.5,
        "seed_per_iteration": True,  # as in a run, so that a resume uses the same draws
    }
    fit: dict[str, Any] = {"base_margin": np.ones((600, 2)), "eval_set": [(frame, both)]}
    model = ours(**HERE, **options).fit(frame, both, **fit)
    alone = plain(**PLAIN, **options).fit(frame, both, **fit)
    assert close(model.predict(frame), alone.predict(frame))
    (found,), (expected,) = (
        each.evals_result()["validation_0"].values() for each in (model, alone)
    )
    assert close(found, expected)
    assert model.feature_importances_[0] == 0
    dataset = ray.data.from_pandas(frame.assign(**both, k=1.0, l=1.0))
    named = clone(model).fit(dataset, ["y", "z"], base_margin=["k", "l"])
    assert close(named.predict(frame), model.predict(frame))
    if ours is RayXGBRegressor:
        assert close(predictions(named.predict(dataset)), model.predict(frame))


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_flat_margins_of_several_classes_have_order_of_library(library: str, rows: Any) -> None:
    x, y = rows[0], rows[1] + (rows[0][:, 2] > 0)
    margin = 2 * np.eye(3)[y]
    if library == "xgboost":
        flat = margin.ravel()
        fit: dict[str, Any] = {"base_margin": flat, "base_margin_eval_set": [flat]}
        ours: Any = RayXGBClassifier(**HERE)
        plain: Any = xgboost.XGBClassifier(**PLAIN)
    else:
        flat = margin.ravel(order="F")
        fit = {"init_score": flat, "eval_init_score": [flat]}
        ours = RayLGBMClassifier(**HERE, **QUIET)
        plain = lightgbm.LGBMClassifier(**PLAIN, **QUIET)
    other = rows[1] + (x[:, 3] > 0)
    for model in (ours, plain):
        model.fit(x, y, eval_set=[(x, other)], **fit)
    assert close(ours.predict_proba(x), plain.predict_proba(x))
    evaluated = [
        model.evals_result() if library == "xgboost" else model.evals_result_
        for model in (ours, plain)
    ]
    (found,), (expected,) = (next(iter(each.values())).values() for each in evaluated)
    assert close(found, expected)
    with pytest.raises(ValueError, match="have 599 values for 600 rows"):
        ours.fit(x, y, **{next(iter(fit)): flat[:599]})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (RayXGBRegressor, "y has 2 columns in the training rows, but 1 in the rows to evaluate"),
        (RayLGBMRegressor, "y must have one column, found 2"),
    ],
)
def test_outputs_that_do_not_fit(model: Any, message: str, rows: Any) -> None:
    frame, y = pd.DataFrame(rows[0]), rows[1]
    with pytest.raises(ValueError, match=message):
        model(**HERE).fit(frame, np.stack([y, y], axis=1), eval_set=[(frame, y)])


def test_xgboost_queries() -> None:
    random = np.random.default_rng(0)
    x, qid = random.normal(size=(400, 3)), np.repeat(np.arange(40), 10)
    y = np.clip(np.round(x[:, 0] + 1), 0, 3).astype(int)
    frame = pd.DataFrame(x, columns=list("abc"))
    by_argument = RayXGBRanker(**HERE).fit(frame, y, qid=qid)
    in_frame = RayXGBRanker(**HERE).fit(frame.assign(qid=qid), y)
    assert np.array_equal(by_argument.predict(frame), in_frame.predict(frame.assign(qid=qid)))
    with pytest.raises(ValueError, match="qid must be in ascending order"):
        RayXGBRanker(**HERE).fit(frame, y, qid=qid[::-1])
    with pytest.raises(ValueError, match="and for eval_set eval_group or eval_qid"):
        RayXGBRanker(**HERE).fit(frame, y, qid=qid, eval_set=[(frame, y)])


@pytest.mark.parametrize("model", [RayLGBMRegressor, RayXGBRegressor])
def test_arguments_that_scikit_learn_users_give(model: Any, rows: Any) -> None:
    x, y = rows
    options = {**HERE, "n_estimators": np.int64(3), "n_jobs": -1}
    assert model(**options).fit(x, y).score(x, y) > 0.1


def test_lightgbm_classifier_encodes_the_labels_of_eval_X_and_eval_y() -> None:
    x = np.linspace(-1, 1, 60).reshape(-1, 1)
    y = np.where(x[:, 0] > 0, "up", "down")
    model = RayLGBMClassifier(verbosity=-1, **HERE)
    by_set = clone(model).fit(x, y, eval_set=[(x.copy(), y)])
    by_pair = clone(model).fit(x, y, eval_X=x.copy(), eval_y=y)
    assert by_pair.evals_result_ == by_set.evals_result_
