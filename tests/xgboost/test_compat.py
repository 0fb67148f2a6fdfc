"""Private APIs of XGBoost: each test fails when XGBoost changes what `_compat` uses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import xgboost

from drawbar.xgboost import _compat


def test_log_filter_drops_messages_and_is_removed(capfd: pytest.CaptureFixture[str]) -> None:
    data = xgboost.DMatrix(np.ones((4, 1)), np.array([1.0, 2.0, 1.0, 2.0]))
    messages: list[bytes] = []

    def drop(message: bytes) -> bool:
        messages.append(message)
        return False

    with xgboost.config_context(verbosity=3):
        with _compat.filter_log(drop):
            xgboost.train({}, data, 1)
        dropped = capfd.readouterr()
        xgboost.train({}, data, 1)
    assert messages
    assert (dropped.out, dropped.err) == ("", "")
    assert capfd.readouterr().out


def test_qid_is_read_from_column_or_argument() -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "qid": [0, 1]})
    rows, qid = _compat.split_qid(frame, None)
    assert (list(rows.columns), np.asarray(qid).tolist()) == (["x"], [0, 1])


def test_objective_takes_labels_and_predictions() -> None:
    def objective(labels: Any, predictions: Any) -> tuple[Any, Any]:
        return predictions - labels, np.ones_like(labels)

    data = xgboost.DMatrix(np.ones((2, 1)), np.array([1.0, 2.0]))
    wrapped: Any = _compat.wrap_objective(objective)
    assert wrapped(np.array([3.0, 3.0]), data)[0].tolist() == [2.0, 1.0]


def test_estimator_configures_fit_and_has_results() -> None:
    estimator = xgboost.XGBRegressor(eval_metric="rmse", feature_weights=[1.0])
    model, metric, params, weights = _compat.configure_fit(
        estimator, None, estimator.get_xgb_params(), None
    )
    assert (model, metric, weights) == (None, None, [1.0])
    assert params["eval_metric"] == "rmse"
    booster = xgboost.Booster()
    _compat.set_fitted_attributes(estimator, booster, {"validation_0": {"rmse": [0.5]}})
    assert estimator.get_booster() is booster
    assert estimator.evals_result() == {"validation_0": {"rmse": [0.5]}}
