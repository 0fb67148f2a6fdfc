"""The numbers of all ranks' validation rows together, where LightGBM gives those of one rank.

LightGBM computes metrics on each rank's own rows. So ranks would see different numbers, and early
stopping would end them on different rounds. After each round the ranks meet once, through Drawbar's
own channel, and every rank gets the same global numbers:

- Means over rows, or over ranking groups, are weighted by the rows, or groups, they stand for:
  exact. So are `rmse`, from the squares, and `gamma_deviance`, which is a sum.
- `r2` is of the sums of squares around the mean of all labels: exact.
- `auc` and `average_precision` need all predictions: exact, from every rank's scores, labels and
  weights, which are gathered.
- `auc_mu` and custom metrics are weighted means of what the ranks found. That is exact for a mean
  over rows; a custom metric of another kind can be made global inside by `allreduce_metric`,
  which gives all ranks the same number, and so does their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import lightgbm
import numpy as np
import numpy.typing as npt
from lightgbm import Booster, Dataset
from lightgbm.callback import CallbackEnv

from drawbar.lightgbm import _c_api
from drawbar.train import collective, get_context

Floats: TypeAlias = npt.NDArray[np.float64]
ScoredRows: TypeAlias = tuple[Floats, npt.NDArray[np.bool_], npt.NDArray[Any]]
"""Scores, whether the label is positive, weights."""

EvalResult: TypeAlias = Any
"""LightGBM's `EvalResult`, before 4.7 a tuple: data, metric, value, whether higher is better."""

_GROUP_METRICS = ("ndcg", "map")


class GlobalEvaluation:
    """A LightGBM callback that makes the round's evaluation global, before other callbacks see it.

    `RayTrainReportCallback` does this as well; use this one in a function that reports by itself.

        lightgbm.train(params, data, valid_sets=[shard], callbacks=[
            drawbar.lightgbm.GlobalEvaluation(), lightgbm.early_stopping(5)])
    """

    order = 5  # LightGBM's own: log_evaluation 10, record_evaluation 20, early_stopping 30
    before_iteration = False

    def __call__(self, env: CallbackEnv) -> None:
        """Replace the numbers of this rank by those of all."""
        found = env.evaluation_result_list
        if found and isinstance(env.model, Booster):
            found[:] = global_evaluation(env.model, found)


@dataclass(frozen=True)
class _SquareSums:
    """Labels' weighted mean, and the sums of their squared distances from it and from scores."""

    mean: float
    around_mean: float
    from_scores: float


@dataclass(frozen=True)
class _RankMetric:
    """What one rank knows of one metric: its value, for how much it stands, or what it is made of.

    Args:
        value: Of this rank's rows.
        weight: Of these rows, or groups.
        rows: For an area.
        squares: For `r2`.
    """

    value: float
    weight: float
    rows: ScoredRows | None
    squares: _SquareSums | None


def global_evaluation(booster: Booster, found: Sequence[EvalResult]) -> list[EvalResult]:
    """Give the evaluation over all ranks' rows, the same list on every rank. A collective.

    Args:
        booster: In training, with its validation sets.
        found: This rank's evaluation: the same metrics on every rank.
    """
    if get_context().get_world_size() == 1:
        return list(found)
    everyone = collective.all_gather([_local_metric(booster, each) for each in found])
    return [
        make_eval_result(each[0], each[1], _merge_metric(each[1], shares), each[3])
        for each, shares in zip(found, zip(*everyone, strict=True), strict=True)
    ]


def make_eval_result(data: str, metric: str, value: float, maximize: bool) -> EvalResult:
    """Give one number as this version of LightGBM gives it to callbacks."""
    kind = getattr(lightgbm, "EvalResult", None)
    fields = (data, metric, value, maximize)
    return kind(*fields) if kind else fields


def _local_metric(booster: Booster, found: EvalResult) -> _RankMetric:
    data, metric = found[0], found[1]
    index = _dataset_index(booster, data)
    dataset = booster.valid_sets[index - 1] if index else booster.train_set
    rows = _scored_rows(booster, index, dataset) if metric in _METRICS_FROM_ALL_ROWS else None
    squares = _square_sums(booster, index, dataset) if metric == "r2" else None
    return _RankMetric(float(found[2]), _metric_weight(dataset, metric), rows, squares)


def _square_sums(booster: Booster, index: int, dataset: Dataset) -> _SquareSums | None:
    labels, weights = np.asarray(dataset.get_label(), dtype=np.float64), _row_weights(dataset)
    if not weights.sum():
        return None
    mean = np.average(labels, weights=weights)
    missed = labels - _c_api.current_predictions(booster, index)
    return _SquareSums(
        float(mean), float(weights @ (labels - mean) ** 2), float(weights @ missed**2)
    )


def _scored_rows(booster: Booster, index: int, dataset: Dataset) -> ScoredRows:
    """Give what an area needs of each row, in as few bytes as can be: it is sent every round."""
    weight = dataset.get_weight()
    positive = np.asarray(dataset.get_label()) > 0
    weights = np.ones(len(positive), np.int8) if weight is None else np.asarray(weight, np.float32)
    return _c_api.current_predictions(booster, index), positive, weights


def _dataset_index(booster: Booster, data: str) -> int:
    """Give the number of a dataset among those of a booster: 0 is what it trains on."""
    names = list(booster.name_valid_sets)
    return names.index(data) + 1 if data in names else 0


def _metric_weight(dataset: Dataset, metric: str) -> float:
    """Say for how much a rank's value of a metric stands: its rows or groups, by their weights."""
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


def _merge_metric(metric: str, shares: Sequence[_RankMetric]) -> float:
    """Give the metric over all rows; a rank without rows knows nothing of it."""
    shares = [share for share in shares if share.weight > 0]
    if metric in _METRICS_FROM_ALL_ROWS:
        parts = zip(*(share.rows for share in shares if share.rows), strict=True)
        return _METRICS_FROM_ALL_ROWS[metric](*map(np.concatenate, parts))
    values = np.array([share.value for share in shares])
    weights = np.array([share.weight for share in shares])
    if metric == "r2":
        return _r2([share.squares for share in shares if share.squares], weights)
    if metric == "gamma_deviance":
        return float(values.sum())
    if metric == "rmse":
        return float(np.sqrt(np.average(values**2, weights=weights)))
    return float(np.average(values, weights=weights))


def _r2(squares: Sequence[_SquareSums], weights: Floats) -> float:
    """Give the share of the labels' variance that the scores explain; 1 or 0 if there is none."""
    means = np.array([each.mean for each in squares])
    between = weights @ (means - np.average(means, weights=weights)) ** 2
    total = between + sum(each.around_mean for each in squares)
    missed = sum(each.from_scores for each in squares)
    return float(1 - missed / total) if total else float(missed == 0)


def area_under_roc(scores: Floats, labels: Floats, weights: Floats) -> float:
    """Give the weighted area under the ROC curve; 1 if there is one class only, as LightGBM has it.

    Args:
        scores: Higher for what is more likely positive; equal scores count half.
        labels: Positive above 0.
        weights: Of the rows.
    """
    positive, negative = _weights_by_score(scores, labels, weights)
    total = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / total) if total else 1.0


def average_precision(scores: Floats, labels: Floats, weights: Floats) -> float:
    """Give the weighted average precision; 1 if there is no negative row, as LightGBM has it."""
    positive, negative = _weights_by_score(scores, labels, weights)
    if not positive.sum():
        return 0.0
    found = np.cumsum(positive[::-1])
    taken = np.cumsum((positive + negative)[::-1])
    return float((positive[::-1] * found / taken).sum() / positive.sum())


def _weights_by_score(scores: Floats, labels: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Sum the weights of positive and of negative rows at each score, from low to high."""
    _, place = np.unique(scores, return_inverse=True)
    is_positive = labels > 0
    positive = np.bincount(place, weights * is_positive).astype(np.float64)
    negative = np.bincount(place, weights * ~is_positive).astype(np.float64)
    return positive, negative


_METRICS_FROM_ALL_ROWS: dict[str, Callable[[Floats, Floats, Floats], float]] = {
    "auc": area_under_roc,
    "average_precision": average_precision,
}
