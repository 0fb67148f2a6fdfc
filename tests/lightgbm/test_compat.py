"""Private APIs of LightGBM: each test fails when LightGBM changes what `_compat` uses.

`test_network.py` and the tests of the estimators use the rest.
"""

from __future__ import annotations

import ctypes
import inspect
from typing import Any

import lightgbm
import numpy as np
import pytest

from drawbar.lightgbm import RayLGBMClassifier, _compat


@pytest.fixture
def booster() -> lightgbm.Booster:
    rows = np.arange(40.0).reshape(20, 2)
    data = lightgbm.Dataset(rows, rows[:, 0] > 20)
    return lightgbm.train({"objective": "binary", "verbosity": -1}, data, 2)


def test_library_reads_handle_of_booster(booster: lightgbm.Booster) -> None:
    count = ctypes.c_int()
    handle = _compat.get_handle(booster)
    _compat.check_error(
        _compat.LIBRARY.LGBM_BoosterGetCurrentIteration(handle, ctypes.byref(count))
    )
    assert count.value == booster.current_iteration() > 0
    with pytest.raises(lightgbm.basic.LightGBMError):
        _compat.check_error(-1)


def test_parameters_are_formatted_and_have_aliases() -> None:
    assert _compat.format_parameters({"max_bin": 3, "metric": ["auc", "l2"]}) == (
        "max_bin=3 metric=auc,l2"
    )
    assert "n_estimators" in _compat.ConfigAliases.get("num_iterations")
    assert _compat.ConfigAliases.get_sorted("num_iterations")[0] == "num_iterations"


def test_estimator_has_names_of_fitted_attributes(booster: lightgbm.Booster) -> None:
    source = inspect.getsource(lightgbm.LGBMModel) + inspect.getsource(lightgbm.LGBMClassifier)
    names = ["_Booster", "_n_features", "_evals_result", "_best_iteration", "_best_score"]
    names += ["_class_weight", "_class_map"]
    if lightgbm.__version__ >= "4.7":
        names.append("_fitted_with_feature_names")
    assert [name for name in names if f"self.{name}" not in source] == []
    history: Any = {"valid": {"auc": [0.5, 0.7]}}
    estimator = RayLGBMClassifier()
    estimator.set_fitted_attributes(booster, history, last_round=1, has_names=False)
    assert (estimator.booster_, estimator.evals_result_) == (booster, history)
    assert (estimator.best_score_, estimator.n_features_) == ({"valid": {"auc": 0.7}}, 2)
    assert _compat.get_class_numbers(estimator) is None


def test_sample_weight_is_validated() -> None:
    assert _compat.check_sample_weight(2, np.ones((3, 1))).tolist() == [2, 2, 2]
