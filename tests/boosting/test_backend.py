"""Workers import a boosting library without scikit-learn if no user code runs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pandas as pd
import pytest
import ray.data

import drawbar.lightgbm
import drawbar.xgboost
from drawbar import train
from drawbar.lightgbm import LightGBMConfig, LightGBMTrainer
from drawbar.lightgbm import RayTrainReportCallback as LightGBMReports
from drawbar.train import RunConfig, ScalingConfig
from drawbar.xgboost import RayTrainReportCallback as XGBoostReports
from drawbar.xgboost import XGBoostConfig, XGBoostTrainer

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

Make = Callable[..., Any]


def _xgboost(**options: Any) -> XGBoostTrainer:
    return XGBoostTrainer(params={"objective": "reg:squarederror"}, **_declared(), **options)


def _lightgbm(**options: Any) -> LightGBMTrainer:
    params = {"objective": options.pop("objective", "regression")}
    return LightGBMTrainer(params=params, **_declared(), **options)


def _declared() -> dict[str, Any]:
    rows = pd.DataFrame({"a": [1.0, 2.0], "y": [0.0, 1.0]})
    return {"label_column": "y", "datasets": {"train": lambda: ray.data.from_pandas(rows)}}


class _ReportsOfUser(XGBoostReports):
    pass


def _of_user(*args: Any, **options: Any) -> Any:
    """Stand for a function of the user; the trainers are made, not run."""


@pytest.mark.parametrize(
    ("make", "options", "imports"),
    [
        (_xgboost, {}, False),
        (_xgboost, {"callbacks": [XGBoostReports(frequency=5)]}, False),
        (_xgboost, {"callbacks": [XGBoostReports(results_postprocessing_fn=_of_user)]}, True),
        (_xgboost, {"callbacks": [_ReportsOfUser()]}, True),
        (_xgboost, {"callbacks": [_of_user]}, True),
        (_xgboost, {"obj": _of_user}, True),
        (_xgboost, {"custom_metric": _of_user}, True),
        (_xgboost, {"xgboost_config": XGBoostConfig(import_sklearn=True)}, True),
        (_lightgbm, {}, False),
        (_lightgbm, {"callbacks": [LightGBMReports(frequency=5)]}, False),
        (_lightgbm, {"callbacks": [LightGBMReports(results_postprocessing_fn=_of_user)]}, True),
        (_lightgbm, {"callbacks": [_of_user]}, True),
        (_lightgbm, {"feval": [_of_user]}, True),
        (_lightgbm, {"objective": _of_user}, True),
        (_lightgbm, {"lightgbm_config": LightGBMConfig(import_sklearn=True)}, True),
    ],
)
def test_worker_imports_sklearn_only_for_user_code(
    make: Make, options: dict[str, Any], imports: bool
) -> None:
    left_out = make(**options).backend_config.skipped_imports
    assert ("sklearn" not in left_out) is imports
    assert ("pandas" in left_out) is (make is _lightgbm and not imports)


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (XGBoostConfig, "import_sklearn"),
        (LightGBMConfig, "import_sklearn"),
        (LightGBMConfig, "import_pandas"),
    ],
)
def test_config_with_invalid_import_option_raises(config: Make, option: str) -> None:
    with pytest.raises(TypeError, match=rf"\.{option} must be a bool or None, found 'no'"):
        config(**{option: "no"})


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("trainer", "option", "config", "library"),
    [
        (XGBoostTrainer, "xgboost_config", XGBoostConfig, "xgboost"),
        pytest.param(
            *(LightGBMTrainer, "lightgbm_config", LightGBMConfig, "lightgbm"),
            marks=pytest.mark.nightly,
        ),
    ],
)
@pytest.mark.parametrize("given", [pytest.param(None, marks=pytest.mark.nightly), False])
def test_training_function_imports_sklearn_unless_disabled(
    trainer: Make, option: str, config: Make, library: str, given: bool | None, tmp_path: Path
) -> None:
    found = imported(trainer, library, tmp_path, **{option: config(import_sklearn=given)})
    expected = given is None
    assert (found["imported"], found["known"]) == (expected, expected)
    assert found["frames"]  # pandas is there in any case


@pytest.mark.usefixtures("ray_cluster")
def test_training_function_without_pandas_hides_it(tmp_path: Path) -> None:
    config = LightGBMConfig(import_sklearn=False, import_pandas=False)
    found = imported(LightGBMTrainer, "lightgbm", tmp_path, lightgbm_config=config)
    assert found == {"imported": False, "known": False, "frames": False}


def imported(trainer: Make, library: str, folder: Path, **options: Any) -> Any:
    """Return the optional libraries that a boosting library found in a worker."""

    def function() -> None:
        compat = importlib.import_module(f"{library}.compat")
        before = "sklearn" in sys.modules
        importlib.import_module("sklearn")  # it can be imported in any case, as can pandas
        frame = importlib.import_module("pandas").DataFrame
        frames = getattr(compat, "pd_DataFrame", frame) is frame  # XGBoost asks as it needs it
        known = compat.SKLEARN_INSTALLED
        train.report({"imported": before, "known": known, "frames": frames})

    workers = ScalingConfig(num_workers=1)
    run_config = RunConfig(storage_path=folder)
    return trainer(function, scaling_config=workers, run_config=run_config, **options).fit().metrics


@pytest.mark.parametrize(
    "library", ["xgboost", pytest.param("lightgbm", marks=pytest.mark.nightly)]
)
def test_process_with_imported_sklearn_keeps_it(library: str) -> None:
    script = f"""
import sys, sklearn
from drawbar._boosting.backend import import_without
import_without(["sklearn"], "{library}")
import {library}.compat
assert {library}.compat.SKLEARN_INSTALLED and sys.modules["sklearn"] is sklearn
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_both_libraries_have_the_same_names() -> None:
    """LightGBM has three more names."""
    plain = [
        {name.replace("LGBM", "XGB").replace("LightGBM", "XGBoost") for name in library.__all__}
        for library in (drawbar.lightgbm, drawbar.xgboost)
    ]
    more = {"GlobalEvaluation", "get_network_params", "normalize_pandas_for_lightgbm"}
    assert plain[0] == plain[1] | more
