"""GlobalEvaluation: compute metrics over the rows of all ranks.

LightGBM computes metrics over each rank's rows. Ranks would see different values, and early
stopping would end them at different rounds. After each round, the ranks therefore exchange their
values with one collective, and every rank gets the same global values:

- Means over rows, or over ranking groups, are weighted by rows or groups, which is exact. `rmse`
  (from its square) and `gamma_deviance` (a sum) are exact, too.
- `r2` is computed from the sums of squares around the mean of all labels: exact.
- `auc` and `average_precision` need all predictions. They are computed from the scores, labels, and
  weights of all ranks: exact.
- `auc_mu` is the weighted mean of the ranks' values, with a warning.
- Custom metrics are weighted means of the ranks' values. This is exact for a mean over rows. Other
  custom metrics can call `allreduce_metric`, which returns the same value on all ranks, so that the
  mean does not change it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import lightgbm
import numpy as np
import numpy.typing as npt
from lightgbm import Booster, Dataset
from lightgbm.callback import CallbackEnv

from drawbar.lightgbm import _c_api
from drawbar.lightgbm._parameters import get_parameter
from drawbar.train import collective, get_context

Floats: TypeAlias = npt.NDArray[np.float64]
ScoredRows: TypeAlias = tuple[Floats, npt.NDArray[np.bool_], npt.NDArray[Any]]
"""Scores, whether labels are positive, and weights."""

EvalResult: TypeAlias = Any
"""LightGBM's `EvalResult`, before 4.7 a tuple: data, metric, value, is higher better."""

_GROUP_METRICS = ("ndcg", "map")


class GlobalEvaluation:
    """LightGBM callback that replaces local metrics with global metrics.

    Other callbacks, such as early stopping, then see the global values. `RayTrainReportCallback`
    includes it. Use it in a training function that calls `report()` itself.

    Example:
        ```python
        callbacks = [drawbar.lightgbm.GlobalEvaluation(), lightgbm.early_stopping(5)]
        lightgbm.train(params, train_set, valid_sets=[shard], callbacks=callbacks)
        ```
    """

    order = 5  # before LightGBM's log_evaluation (10), record_evaluation (20), early_stopping (30)
    before_iteration = False

    def __call__(self, env: CallbackEnv) -> None:
        """Replace this rank's metrics by global metrics."""
        results = env.evaluation_result_list
        if not isinstance(env.model, Booster):
            return
        if env.iteration == env.begin_iteration and (results or env.model.name_valid_sets):
            _warn_of_ignored_metrics(env.params, results or ())
        if results:
            results[:] = global_evaluation(env.model, results)


_METRIC_ALIASES = {
    "l1": ("mean_absolute_error", "mae", "regression_l1"),
    "l2": ("mean_squared_error", "mse", "regression_l2", "regression"),
    "rmse": ("root_mean_squared_error", "l2_root"),
    "mape": ("mean_absolute_percentage_error",),
    "ndcg": ("lambdarank", "rank_xendcg", "xendcg", "xe_ndcg", "xe_ndcg_mart", "xendcg_mart"),
    "map": ("mean_average_precision",),
    "binary_logloss": ("binary",),
    "multi_logloss": ("multiclass", "softmax", "multiclassova", "multiclass_ova", "ova", "ovr"),
    "cross_entropy": ("xentropy",),
    "cross_entropy_lambda": ("xentlambda",),
    "kullback_leibler": ("kldiv",),
}
"""Other names of metrics, by the name that results have."""

_NO_METRICS = ("", "none", "null", "custom", "na")


def _warn_of_ignored_metrics(params: Mapping[str, object], results: Sequence[EvalResult]) -> None:
    """Warn of names that LightGBM does not know. It ignores them silently.

    Args:
        params: LightGBM's parameters.
        results: Metrics of the first round.
    """
    value = get_parameter(params, "metric", ())
    names = value.split(",") if isinstance(value, str) else value
    evaluated = {str(result[1]).partition("@")[0] for result in results}
    known = {alias for name in evaluated for alias in (name, *_METRIC_ALIASES.get(name, ()))}
    ignored = [
        name
        for name in (names if isinstance(names, list | tuple | set) else ())
        if isinstance(name, str) and name.strip().lower() not in known.union(_NO_METRICS)
    ]
    if ignored and get_context().get_world_rank() == 0:
        warnings.warn(
            f"LightGBM {lightgbm.__version__} has ignored {sorted(ignored)} in params['metric'], "
            "because it has no metrics with these names. Check their spelling; positions of "
            "ranking metrics are set with params['eval_at'].",
            stacklevel=2,
        )


@dataclass(frozen=True)
class _SquareSums:
    """Weighted mean of labels, and sums of squared distances of labels from it and from scores."""

    mean: float
    around_mean: float
    from_scores: float


@dataclass(frozen=True)
class _RankMetric:
    """Metric of one rank, with the data needed to combine it.

    Args:
        value: Value over this rank's rows.
        weight: Total weight of these rows or groups.
        rows: Scores and labels, for metrics that need all rows.
        squares: Sums of squares, for `r2`.
    """

    value: float
    weight: float
    rows: ScoredRows | None
    squares: _SquareSums | None


def global_evaluation(booster: Booster, results: Sequence[EvalResult]) -> list[EvalResult]:
    """Return the metrics over all ranks' rows, the same list on every rank. Collective.

    Args:
        booster: Booster in training, with its validation sets.
        results: Metrics of this rank. All ranks must have the same metrics.
    """
    if get_context().get_world_size() == 1:
        return list(results)
    if any(result[1] == "auc_mu" for result in results) and get_context().get_world_rank() == 0:
        warnings.warn(  # shown once
            "metric 'auc_mu' is the mean of the workers' values, weighted by rows, which differs "
            "from the value of all rows. For early stopping, use multi_logloss, or set "
            "num_workers=1.",
            stacklevel=2,
        )
    by_rank = collective.all_gather([_local_metric(booster, result) for result in results])
    return [
        make_eval_result(result[0], result[1], _merge_metric(result[1], metrics), result[3])
        for result, metrics in zip(results, zip(*by_rank, strict=True), strict=True)
    ]


def make_eval_result(data: str, metric: str, value: float, maximize: bool) -> EvalResult:
    """Create a metric result in the format of this version of LightGBM."""
    kind = getattr(lightgbm, "EvalResult", None)
    fields = (data, metric, value, maximize)
    return kind(*fields) if kind else fields


def _local_metric(booster: Booster, result: EvalResult) -> _RankMetric:
    data, metric = result[0], result[1]
    index = _dataset_index(booster, data)
    dataset = booster.valid_sets[index - 1] if index else booster.train_set
    rows = _scored_rows(booster, index, dataset) if metric in _METRICS_FROM_ALL_ROWS else None
    squares = _square_sums(booster, index, dataset) if metric == "r2" else None
    return _RankMetric(float(result[2]), _metric_weight(dataset, metric), rows, squares)


def _square_sums(booster: Booster, index: int, dataset: Dataset) -> _SquareSums | None:
    labels, weights = np.asarray(dataset.get_label(), dtype=np.float64), _row_weights(dataset)
    if not weights.sum():
        return None
    mean = np.average(labels, weights=weights)
    residuals = labels - _c_api.current_predictions(booster, index)
    return _SquareSums(
        float(mean), float(weights @ (labels - mean) ** 2), float(weights @ residuals**2)
    )


def _scored_rows(booster: Booster, index: int, dataset: Dataset) -> ScoredRows:
    """Return scores, labels, and weights in few bytes, because they are sent every round."""
    weight = dataset.get_weight()
    positive = np.asarray(dataset.get_label()) > 0
    weights = np.ones(len(positive), np.int8) if weight is None else np.asarray(weight, np.float32)
    return _c_api.current_predictions(booster, index), positive, weights


def _dataset_index(booster: Booster, data: str) -> int:
    """Return the index of a dataset in a booster: 0 is the training data."""
    names = list(booster.name_valid_sets)
    return names.index(data) + 1 if data in names else 0


def _metric_weight(dataset: Dataset, metric: str) -> float:
    """Return the weight of a rank's metric: its weighted number of rows or groups."""
    if metric == "cross_entropy_lambda":  # LightGBM divides its weighted sum by the rows
        return float(dataset.num_data())
    group = dataset.get_group()
    if metric.partition("@")[0] not in _GROUP_METRICS or group is None:
        return float(_row_weights(dataset).sum())
    if dataset.get_weight() is None:
        return float(len(group))
    starts = np.concatenate([[0], np.cumsum(np.asarray(group))[:-1]])
    return float((np.add.reduceat(_row_weights(dataset), starts) / group).sum())


def _row_weights(dataset: Dataset) -> Floats:
    weight = dataset.get_weight()
    return np.ones(dataset.num_data()) if weight is None else np.asarray(weight, dtype=np.float64)


def _merge_metric(metric: str, rank_metrics: Sequence[_RankMetric]) -> float:
    """Combine a metric of all ranks. Ranks without rows are ignored."""
    rank_metrics = [item for item in rank_metrics if item.weight > 0]
    if metric in _METRICS_FROM_ALL_ROWS:
        parts = zip(*(item.rows for item in rank_metrics if item.rows), strict=True)
        return _METRICS_FROM_ALL_ROWS[metric](*map(np.concatenate, parts))
    values = np.array([item.value for item in rank_metrics])
    weights = np.array([item.weight for item in rank_metrics])
    if metric == "r2":
        return _r2([item.squares for item in rank_metrics if item.squares], weights)
    if metric == "gamma_deviance":
        return float(values.sum())
    if metric == "rmse":
        return float(np.sqrt(np.average(values**2, weights=weights)))
    return float(np.average(values, weights=weights))


def _r2(squares: Sequence[_SquareSums], weights: Floats) -> float:
    """Return the explained share of the labels' variance; 1 or 0 if the variance is 0."""
    means = np.array([item.mean for item in squares])
    between = weights @ (means - np.average(means, weights=weights)) ** 2
    total = between + sum(item.around_mean for item in squares)
    residual = sum(item.from_scores for item in squares)
    return float(1 - residual / total) if total else float(residual == 0)


def area_under_roc(scores: Floats, labels: Floats, weights: Floats) -> float:
    """Return the weighted area under the ROC curve; 1 for a single class, as in LightGBM.

    Args:
        scores: Scores, higher for positive rows. Ties count half.
        labels: Labels, positive if above 0.
        weights: Weights of the rows.
    """
    positive, negative = _weights_by_score(scores, labels, weights)
    total = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / total) if total else 1.0


def average_precision(scores: Floats, labels: Floats, weights: Floats) -> float:
    """Return the weighted average precision; 1 without negative rows, as in LightGBM."""
    positive, negative = _weights_by_score(scores, labels, weights)
    if not positive.sum():
        return 0.0
    positive_sums = np.cumsum(positive[::-1])
    all_sums = np.cumsum((positive + negative)[::-1])
    return float((positive[::-1] * positive_sums / all_sums).sum() / positive.sum())


def _weights_by_score(scores: Floats, labels: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Sum the weights of positive and of negative rows for each score, in ascending order."""
    _, score_index = np.unique(scores, return_inverse=True)
    is_positive = labels > 0
    positive = np.bincount(score_index, weights * is_positive).astype(np.float64)
    negative = np.bincount(score_index, weights * ~is_positive).astype(np.float64)
    return positive, negative


_METRICS_FROM_ALL_ROWS: dict[str, Callable[[Floats, Floats, Floats], float]] = {
    "auc": area_under_roc,
    "average_precision": average_precision,
}
