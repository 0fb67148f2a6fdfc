"""Validate and complete XGBoost parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drawbar._boosting.shard import Shard
from drawbar._boosting.threads import warn_oversubscribed_threads, worker_threads
from drawbar._boosting.training_spec import validate_labels
from drawbar.train import ScalingConfig

_SUPPORTED_VALUES = {"tree_method": ("auto", "hist"), "booster": ("gbtree", "dart")}
"""Values with which XGBoost can train on data that is binned block by block."""

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
"""Valid labels of objectives that do not accept all labels."""

PERCENTILE_OBJECTIVES = ("reg:absoluteerror", "reg:quantileerror")
"""Objectives whose leaf values are percentiles of a worker's rows."""

PARAMETER_ALIASES = {
    "num_boost_round": ("num_boost_round", "n_estimators"),
    "early_stopping_rounds": ("early_stopping_rounds",),
}
"""Names of the trainer's arguments in `xgboost.train` and the estimators."""

_THREADS = ("nthread", "n_jobs")
"""XGBoost's names for the number of threads."""


def set_num_threads(params: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters with a number of threads; by default this worker's CPUs."""
    others = {name: value for name, value in params.items() if name not in _THREADS}
    return {**others, "nthread": max(_threads(params), 0) or worker_threads()}


def _threads(params: Mapping[str, Any]) -> int:
    """Return the number of threads that is set; 0 or less means the worker's CPUs."""
    return int(next((params[name] for name in _THREADS if params.get(name) is not None), 0))


def validate_parameters(
    params: Mapping[str, object], scaling_config: ScalingConfig, *, has_groups: bool
) -> None:
    """Check the parameters in the driver, as far as they do not depend on the data.

    Args:
        params: XGBoost's parameters.
        scaling_config: Resources of the workers.
        has_groups: Whether the data has a column with the query of each row.

    Raises:
        ValueError: XGBoostTrainer(params=...) does not support a parameter.
    """
    warn_oversubscribed_threads("nthread", _threads(params), scaling_config)
    for name, supported in _SUPPORTED_VALUES.items():
        if (value := params.get(name)) not in (None, *supported):
            raise ValueError(
                f"XGBoostTrainer(params=...) supports {name} "
                f"{' and '.join(map(repr, supported))}, found {value!r}. Use one of these, or a "
                "training function with xgboost.DMatrix."
            )
    device = str(params.get("device", "cpu"))
    if device.startswith(("cuda", "gpu")) and not scaling_config.use_gpu:
        raise ValueError(
            f"params['device'] is {device!r}, but the workers have no GPU. Set "
            "ScalingConfig(use_gpu=True), or remove the parameter."
        )
    _check_objective(params, has_groups)
    validate_num_workers(params, scaling_config.max_workers)


def _check_objective(params: Mapping[str, object], has_groups: bool) -> None:
    objective = str(params.get("objective"))
    if objective.startswith("rank:") and not has_groups:
        raise ValueError(f"objective {objective!r} needs group_column, the query of each row.")
    if objective.startswith("multi:") and not params.get("num_class"):
        raise ValueError(f"objective {objective!r} needs params['num_class'].")
    if objective == "survival:aft":
        raise ValueError(
            "objective 'survival:aft' needs a lower and an upper bound for each label, which "
            "XGBoostTrainer(params=...) does not support. Use a training function."
        )


def validate_num_workers(params: Mapping[str, object], num_workers: int) -> None:
    """Check the objective against the number of workers.

    Raises:
        ValueError: XGBoost cannot train the objective on several workers.
    """
    if num_workers > 1 and params.get("objective") == "survival:cox":
        raise ValueError(
            "objective 'survival:cox' compares each row with all rows of a later time, but XGBoost "
            f"compares only the rows of one worker, found {num_workers} workers. Set num_workers=1."
        )


def validate_objective_labels(shard: Shard, params: Mapping[str, Any]) -> None:
    """Check the labels of all ranks against the objective.

    Raises:
        ValueError: A label is out of range. Every rank raises the same error.
    """
    objective = str(params.get("objective", "reg:squarederror"))
    rule = _LABEL_RANGES.get(objective, {})
    if objective.startswith("multi:"):
        rule = {"low": 0, "high": params["num_class"] - 1, "whole_numbers": True}
    if rule:
        validate_labels(shard, f"objective {objective!r}", **rule)
