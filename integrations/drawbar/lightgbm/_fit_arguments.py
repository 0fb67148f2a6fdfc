"""Interpret the arguments of `fit` of LightGBM's estimators: evaluation sets, metrics, weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drawbar._boosting.user_data import ColumnData, FeatureData
from drawbar.lightgbm._compat import EvalFunctionWrapper
from drawbar.lightgbm._parameters import find_alias


def pop_parameter(params: dict[str, object], name: str) -> object:
    """Remove a parameter under any of its aliases and return it; None if it is not set."""
    alias = find_alias(params, name)
    return params.pop(alias) if alias else None


def add_metrics(params: dict[str, object], eval_metric: object) -> list[object]:
    """Add the metrics of `fit` before the objective's metrics. Return the custom ones."""
    metrics = (
        eval_metric
        if isinstance(eval_metric, list)
        else []
        if eval_metric is None
        else [eval_metric]
    )
    defaults = params["metric"] if isinstance(params["metric"], list) else [params["metric"]]
    built_in = [metric for metric in metrics if isinstance(metric, str) and metric not in defaults]
    params["metric"] = [*built_in, *(metric for metric in defaults if metric is not None)]
    return [EvalFunctionWrapper(metric) for metric in metrics if callable(metric)]


def with_class_weights(weight: ColumnData, by_class: object, label: ColumnData) -> ColumnData:
    """Return the weights of rows, multiplied by the weights of their classes."""
    from sklearn.utils.class_weight import compute_sample_weight

    by_row = compute_sample_weight(by_class, label)
    return by_row if weight is None else by_row * weight


def as_list(eval_set: Any) -> list[tuple[FeatureData, ColumnData]]:
    """Return the pairs of features and labels of an `eval_set`."""
    return [eval_set] if isinstance(eval_set, tuple) else list(eval_set or ())


def eval_pairs(
    eval_set: object, eval_X: FeatureData, eval_y: ColumnData
) -> list[tuple[FeatureData, ColumnData]]:
    """Return features and labels to evaluate, from `eval_set` or `eval_X` and `eval_y`."""
    if eval_set is not None or eval_X is None:
        return as_list(eval_set)
    if eval_y is None:
        raise ValueError("eval_X is set, but eval_y is None. Pass both.")
    if isinstance(eval_X, tuple):
        return list(zip(eval_X, eval_y, strict=True))
    return [(eval_X, eval_y)]


def dataset_names(
    pairs: Sequence[tuple[FeatureData, ColumnData]],
    eval_names: Sequence[str] | str | None,
    training: tuple[FeatureData, ColumnData],
) -> list[tuple[str, str]]:
    """Return the dataset name ("train" for the training rows) and the display name of each pair."""
    eval_names = [eval_names] if isinstance(eval_names, str) else eval_names
    names: list[tuple[str, str]] = []
    for number, (features, label) in enumerate(pairs):
        display_name = get_item(eval_names, number)
        if features is training[0] and label is training[1]:
            names.append(("train", display_name or "training"))
        elif display_name in {None, "train", *(name for name, _ in names)}:
            names.append((f"valid_{number}", display_name or f"valid_{number}"))
        else:
            names.append((display_name, display_name))
    return names


def get_item(values: Any, number: int) -> Any:
    """Return an item of a list or dict of options; None if there is none."""
    if values is None:
        return None
    return values.get(number) if isinstance(values, dict) else values[number]


def categorical_names(categorical: Any, names: Sequence[str]) -> list[str] | None:
    """Return the names of categorical features; None for LightGBM's "auto"."""
    if isinstance(categorical, str):
        return None
    return [feature if isinstance(feature, str) else names[feature] for feature in categorical]
