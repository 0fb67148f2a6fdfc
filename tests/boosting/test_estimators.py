"""Estimators of both libraries are scikit-learn's as far as the plain ones are."""

from __future__ import annotations

from typing import Any
from unittest import SkipTest

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray
import xgboost
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.metrics import mean_absolute_error
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import estimator_checks_generator

from drawbar.lightgbm import RayLGBMClassifier, RayLGBMRanker, RayLGBMRegressor
from drawbar.train import ScalingConfig
from drawbar.xgboost import RayXGBClassifier, RayXGBRanker, RayXGBRegressor

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data"),  # it warns of itself
]

HERE = ScalingConfig(num_workers=0)
TWO = ScalingConfig(num_workers=2)
QUIET: dict[str, Any] = {"n_estimators": 5, "verbosity": -1}


def find_failed_checks(estimator: Any, names: set[str] | None = None) -> set[str]:
    """Return which checks of scikit-learn fail, of all or of these."""
    failed = set()
    for checked, check in estimator_checks_generator(estimator):
        name = check.func.__name__
        if names is None or name in names:
            try:
                check(checked)
            except SkipTest:
                pass
            except Exception:
                failed.add(name)
    return failed


@pytest.mark.filterwarnings("ignore")  # the plain estimators' own
@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (RayLGBMClassifier(**QUIET, scaling_config=HERE), lightgbm.LGBMClassifier(**QUIET)),
        pytest.param(
            RayLGBMRegressor(**QUIET, scaling_config=HERE),
            lightgbm.LGBMRegressor(**QUIET),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            RayXGBClassifier(n_estimators=5, scaling_config=HERE),
            xgboost.XGBClassifier(n_estimators=5),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            RayXGBRegressor(n_estimators=5, scaling_config=HERE),
            xgboost.XGBRegressor(n_estimators=5),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_check_estimator_fails_only_where_the_plain_one_does(ours: Any, plain: Any) -> None:
    failed = find_failed_checks(ours)
    assert find_failed_checks(plain, failed) == failed


def share_of_wrong(truth: Any, predicted: Any) -> tuple[str, float, bool]:
    """Custom metric of LightGBM."""
    return "share_of_wrong", float(np.mean(predicted.argmax(axis=1) != truth)), False


@pytest.mark.parametrize(
    "classifier", [pytest.param(RayLGBMClassifier, marks=pytest.mark.nightly), RayXGBClassifier]
)
def test_classifiers_on_two_workers_stop_early(classifier: Any) -> None:
    is_lightgbm = classifier is RayLGBMClassifier
    x, y = load_digits(n_class=3, return_X_y=True)
    early_stopping = {} if is_lightgbm else {"early_stopping_rounds": 4}
    model = classifier(n_estimators=200, learning_rate=0.5, scaling_config=TWO, **early_stopping)
    arguments: dict[str, Any] = {}
    if is_lightgbm:
        arguments["eval_metric"] = ["multi_error", share_of_wrong]
        arguments["callbacks"] = [lightgbm.early_stopping(4, verbose=False)]
    valid = [(x[300:], y[300:])]
    model.fit(x[:300], y[:300], sample_weight=np.ones(300), eval_set=valid, **arguments)
    assert model.score(x, y) > 0.95
    assert model.predict_proba(x).shape == (len(y), 3)
    assert list(model.classes_) == [0, 1, 2]
    assert model.n_features_in_ == 64
    assert hasattr(model, "booster_" if is_lightgbm else "get_booster")
    evaluated = model.evals_result_ if is_lightgbm else model.evals_result()
    (metrics,) = evaluated.values()
    loss = "multi_logloss" if is_lightgbm else "mlogloss"
    assert set(metrics) == {loss, *(("multi_error", "share_of_wrong") if is_lightgbm else ())}
    best = model.best_iteration_ if is_lightgbm else model.best_iteration
    assert 0 < best < len(metrics[loss]) < 200
    assert metrics[loss][-1] < metrics[loss][0] / 2


@pytest.mark.parametrize(
    "classifier", [RayLGBMClassifier, pytest.param(RayXGBClassifier, marks=pytest.mark.nightly)]
)
def test_estimator_with_any_data_type_fits_same_model(classifier: Any) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    frame = pd.DataFrame(x, columns=[f"c{i}" for i in range(30)])
    dataset = ray.data.from_pandas(frame.assign(y=y))
    model = classifier(n_estimators=5, scaling_config=HERE)
    found = [
        clone(model).fit(x, y).predict_proba(x),
        clone(model).fit(frame, pd.Series(y)).predict_proba(frame),
        clone(model).fit(pa.Table.from_pandas(frame), y).predict_proba(frame),
    ]
    fitted = clone(model).fit(dataset, "y", eval_set=[(dataset, "y")])
    found.append(fitted.predict_proba(frame))
    for each in found[1:]:
        assert np.array_equal(each, found[0])
    predicted = np.stack(fitted.predict_proba(dataset).to_pandas()["prediction"].to_numpy())
    assert predicted == pytest.approx(found[0], abs=1e-6)


def test_labels_by_name_in_a_ray_dataset() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    names = np.array(["malignant", "benign"])
    frame = pd.DataFrame(x[:, :5], columns=list("abcde"))
    dataset = ray.data.from_pandas(frame.assign(y=names[y]))
    model = RayLGBMClassifier(n_estimators=5, scaling_config=HERE).fit(dataset, "y")
    assert list(model.classes_) == ["benign", "malignant"]
    assert (model.predict(frame) == names[y]).mean() > 0.9


@pytest.mark.parametrize(
    "regressor", [pytest.param(RayLGBMRegressor, marks=pytest.mark.nightly), RayXGBRegressor]
)
def test_estimator_grid_search_and_continued_fit(regressor: Any) -> None:
    x, y = load_diabetes(return_X_y=True)
    search = GridSearchCV(
        regressor(n_estimators=10, scaling_config=HERE), {"learning_rate": [0.001, 0.2]}, cv=2
    )
    search.fit(x, y)
    assert search.best_params_ == {"learning_rate": 0.2}
    best = search.best_estimator_
    again = clone(best)
    if regressor is RayLGBMRegressor:
        again.fit(x, y, init_model=best)
        assert again.booster_.num_trees() == 20
    else:
        again.fit(x, y, xgb_model=best)
        assert again.get_booster().num_boosted_rounds() == 20
    assert again.score(x, y) > best.score(x, y)


@pytest.mark.parametrize(
    "ranker", [RayLGBMRanker, pytest.param(RayXGBRanker, marks=pytest.mark.nightly)]
)
def test_rankers_keep_queries_whole(ranker: Any) -> None:
    random = np.random.default_rng(0)
    x, sizes = random.normal(size=(400, 3)), np.full(40, 10)
    y = np.clip(np.round(x[:, 0] + 1), 0, 3).astype(int)
    model = ranker(n_estimators=10, scaling_config=TWO)
    model.fit(x, y, group=sizes, eval_set=[(x, y)], eval_group=[sizes])
    assert np.corrcoef(model.predict(x), x[:, 0])[0, 1] > 0.8


def test_callable_metric_on_unequal_parts_is_weighted_by_rows() -> None:
    x, y = load_diabetes(return_X_y=True)
    weight = np.where(np.arange(3) < 1, 9.0, 1.0)  # worker 0 has the first of three rows
    evaluated: dict[str, Any] = {"eval_set": [(x[:3], y[:3])], "sample_weight_eval_set": [weight]}
    model = RayXGBRegressor(n_estimators=2, eval_metric=mean_absolute_error, scaling_config=TWO)
    model.fit(x, y, sample_weight=np.ones(len(y)), **evaluated)
    expected = mean_absolute_error(y[:3], model.predict(x[:3]), sample_weight=weight)
    history = model.evals_result()["validation_0"]["mean_absolute_error"]
    assert history[-1] == pytest.approx(expected, rel=1e-6)
