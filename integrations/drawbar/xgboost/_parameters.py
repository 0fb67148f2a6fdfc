"""XGBoost's parameters: what a declared training checks of them, and adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drawbar._boosting import Shard, validate_labels, warn_oversubscribed_threads, worker_threads
from drawbar.train import ScalingConfig

_SUPPORTED_VALUES = {"tree_method": ("auto", "hist"), "booster": ("gbtree", "dart")}
"""What trains on data that is binned as it arrives."""

_LABEL_RANGES: dict[str, dict[str, Any]] = {
    "binary:logistic": {"low": 0, "high": 1},
    "binary:logitraw": {"low": 0, "high": 1},
    "binary:hinge": {"low": 0, "high": 1, "whole_numbers": True},
    "reg:logistic": {"low": 0, "high": 1},
    "count:poisson": {"low": 0},
    "reg:gamma": {"low": 0},
    "reg:tweedie": {"low": 0},
    "rank:map": {"low": 0, "high": 1, "whole_numbers": True},
}
"""What labels an objective takes, where it does not take all."""

PERCENTILE_OBJECTIVES = ("reg:absoluteerror", "reg:quantileerror")
"""Objectives whose leaf values are percentiles of a worker's rows."""

PARAMETER_ALIASES = {
    "num_boost_round": ("num_boost_round", "n_estimators"),
    "early_stopping_rounds": ("early_stopping_rounds",),
}
"""What `xgboost.train` and the estimators call the trainer's arguments."""

_THREADS = ("nthread", "n_jobs")
"""XGBoost's names for the number of threads."""


def set_num_threads(params: Mapping[str, object]) -> dict[str, object]:
    """Give the parameters with a number of threads: this worker's share unless one is set."""
    given = {name: each for name, each in params.items() if name not in _THREADS}
    return {**given, "nthread": max(_threads(params), 0) or worker_threads()}


def _threads(params: Mapping[str, Any]) -> int:
    """Give the number of threads that is set; 0, or less, is the worker's own share."""
    return int(next((params[name] for name in _THREADS if params.get(name) is not None), 0))


def validate_parameters(
    params: Mapping[str, object], scaling_config: ScalingConfig, *, has_groups: bool
) -> None:
    """Check, in the driver, what does not depend on the data.

    Args:
        params: XGBoost's parameters.
        scaling_config: What the workers have.
        grouped: Whether it is known which query a row belongs to.

    Raises:
        ValueError: A declared training cannot work with them.
    """
    warn_oversubscribed_threads("nthread", _threads(params), scaling_config)
    for name, known in _SUPPORTED_VALUES.items():
        if (found := params.get(name)) not in (None, *known):
            raise ValueError(
                f"params[{name!r}] is {found!r}, but a declared training bins the data as it "
                f"arrives, which works for {' and '.join(map(repr, known))}; use one of these, "
                "or a training function with an xgboost.DMatrix"
            )
    device = str(params.get("device", "cpu"))
    if device.startswith(("cuda", "gpu")) and not scaling_config.use_gpu:
        raise ValueError(
            f"params['device'] is {device!r}, but the workers have no GPU; set "
            "ScalingConfig(use_gpu=True), or leave the parameter out"
        )
    _check_objective(params, has_groups)


def _check_objective(params: Mapping[str, object], has_groups: bool) -> None:
    objective = str(params.get("objective"))
    if objective.startswith("rank:") and not has_groups:
        raise ValueError(f"objective {objective!r} needs group_column, the query of each row")
    if objective.startswith("multi:") and not params.get("num_class"):
        raise ValueError(f"objective {objective!r} needs params['num_class']")
    if objective == "survival:aft":
        raise ValueError(
            "objective 'survival:aft' needs a lower and an upper bound for each label, which "
            "a declared training does not know; use a training function"
        )


def validate_objective_labels(shard: Shard, params: Mapping[str, Any]) -> None:
    """Check the labels of all ranks against the objective.

    Raises:
        ValueError: A label is out of range; every rank gets the same error.
    """
    objective = str(params.get("objective", "reg:squarederror"))
    rule = _LABEL_RANGES.get(objective, {})
    if objective.startswith("multi:"):
        rule = {"low": 0, "high": params["num_class"] - 1, "whole_numbers": True}
    if rule:
        validate_labels(shard, f"objective {objective!r}", **rule)
