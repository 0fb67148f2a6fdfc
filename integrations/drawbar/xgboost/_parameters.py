"""Validate and complete XGBoost parameters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from drawbar._boosting.shard import Shard
from drawbar._boosting.threads import warn_oversubscribed_threads, worker_threads
from drawbar._boosting.training_spec import validate_labels
from drawbar.train import ScalingConfig, get_context

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

_QUERY_METRICS = ("ndcg", "map", "pre")
"""Metrics that sort the rows of a query."""

_AVERAGED_METRICS = ("auc", "aucpr")
"""Metrics that XGBoost averages over workers if there are no queries."""

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
    """Check the objective and the metrics against the number of workers.

    Raises:
        ValueError: XGBoost cannot train the objective or evaluate a metric on several workers.
    """
    if num_workers == 1:
        return
    if "cox-nloglik" in metric_names(params):
        raise ValueError(
            "eval_metric 'cox-nloglik' needs the rows of all workers, but XGBoost evaluates it in "
            f"one process only, found {num_workers} workers. Set num_workers=1, or remove it."
        )
    if params.get("objective") == "survival:cox":
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


def metric_names(params: Mapping[str, Any]) -> list[str]:
    """Return the names in `eval_metric` without parameters: "ndcg" for "ndcg@5-"."""
    metrics = params.get("eval_metric") or ()
    metrics = [metrics] if isinstance(metrics, str) else metrics
    return [metric.partition("@")[0].rstrip("-") for metric in metrics if isinstance(metric, str)]


def require_no_ranking(params: Mapping[str, object]) -> None:
    """Check that the objective does not rank rows, because the data has no queries.

    Raises:
        ValueError: It ranks rows.
    """
    objective = str(params.get("objective"))
    if objective.startswith("rank:"):
        raise ValueError(
            f"objective {objective!r} ranks all rows of data without queries, but XGBoost ranks "
            "only the rows of one worker. Set the qid of the matrix, or set num_workers=1."
        )


def check_metrics_without_queries(params: Mapping[str, object]) -> None:
    """Check the metrics of data without queries on several workers. Rank 0 shows warnings.

    Raises:
        ValueError: A metric ranks the rows of a query.
    """
    for metric in metric_names(params):
        if metric in _QUERY_METRICS:
            raise ValueError(
                f"eval_metric {metric!r} ranks all rows of data without queries, but XGBoost ranks "
                "only the rows of one worker. Set the queries (group_column, or the matrix's qid), "
                "or set num_workers=1."
            )
        if metric in _AVERAGED_METRICS and get_context().get_world_rank() == 0:
            warnings.warn(
                f"eval_metric {metric!r} is the mean of the workers' values, which differs from "
                "the value of all rows unless each worker has a random sample of the rows. For "
                "early stopping, use logloss or mlogloss, or shuffle the rows.",
                stacklevel=4,
            )
