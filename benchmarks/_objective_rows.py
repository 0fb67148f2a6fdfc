"""Objectives of XGBoost and LightGBM, and rows to train them on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

Library = Literal["xgboost", "lightgbm"]
Order = Literal["sorted", "shuffled", "weighted"]

ORDERS: tuple[Order, ...] = ("sorted", "shuffled", "weighted")
ROWS_PER_QUERY = 10
FEATURES = ["a", "b", "c", "d"]


@dataclass(frozen=True)
class Objective:
    """An objective with the kind of its labels.

    Args:
        library: "xgboost" or "lightgbm".
        name: Value of the parameter `objective`.
        labels: Kind of the labels.
        params: Other parameters of the library.
    """

    library: Library
    name: str
    labels: Literal["real", "positive", "count", "share", "binary", "class", "grade", "time"]
    params: tuple[tuple[str, Any], ...] = ()

    @property
    def is_ranking(self) -> bool:
        """True if rows belong to queries."""
        return self.name.startswith(("rank", "lambdarank"))


def _make(library: Library, labels: Any, names: Iterable[str], **params: Any) -> list[Objective]:
    return [Objective(library, name, labels, tuple(params.items())) for name in names]


OBJECTIVES = [
    *_make("xgboost", "real", ["reg:squarederror", "reg:pseudohubererror", "reg:absoluteerror"]),
    *_make("xgboost", "real", ["reg:quantileerror"], quantile_alpha=0.9),
    *_make("xgboost", "positive", ["reg:squaredlogerror", "reg:gamma", "reg:tweedie"]),
    *_make("xgboost", "count", ["count:poisson"]),
    *_make("xgboost", "share", ["reg:logistic"]),
    *_make("xgboost", "binary", ["binary:logistic", "binary:logitraw", "binary:hinge"]),
    *_make(
        "xgboost", "class", ["multi:softmax", "multi:softprob"], num_class=3, eval_metric="mlogloss"
    ),
    *_make("xgboost", "binary", ["rank:map"]),
    *_make("xgboost", "grade", ["rank:ndcg", "rank:pairwise"]),
    *_make("xgboost", "time", ["survival:aft", "survival:cox"]),
    *_make("lightgbm", "real", ["regression", "l1", "huber", "fair"]),
    *_make("lightgbm", "real", ["quantile"], alpha=0.9),
    *_make("lightgbm", "positive", ["mape", "gamma", "tweedie"]),
    *_make("lightgbm", "count", ["poisson"]),
    *_make("lightgbm", "share", ["cross_entropy", "cross_entropy_lambda"]),
    *_make("lightgbm", "binary", ["binary"]),
    *_make("lightgbm", "class", ["multiclass", "multiclassova"], num_class=3),
    *_make("lightgbm", "grade", ["lambdarank", "rank_xendcg"], eval_at=5),
]
"""All objectives that the libraries document. Aliases are left out."""


def make_rows(objective: Objective, order: Order, rows: int) -> pd.DataFrame:
    """Make features, the label `y`, and for some objectives or orders `weight` and `query`.

    Args:
        objective: The objective.
        order: "sorted" by label, "shuffled", or "weighted": shuffled, with weights from 0 to 3.
        rows: Number of rows.
    """
    rng = np.random.default_rng(0)
    # Few values for each feature, so that all workers and one process have the same bins.
    frame = pd.DataFrame(rng.integers(0, 40, (rows, 4)) / 40, columns=FEATURES).astype("float32")
    signal = 2 * frame.a + 3 * frame.b * frame.c - 1.5 + rng.normal(scale=0.5, size=rows)
    frame["y"] = _labels(objective, signal.to_numpy(), rng)
    if objective.is_ranking:
        return _with_queries(frame, order, rng)
    if order == "sorted":
        frame = frame.sort_values("y", ignore_index=True)
    if order == "weighted":
        # `cross_entropy_lambda` rejects weights of 0.
        lowest = 0.25 if objective.name == "cross_entropy_lambda" else 0
        frame["weight"] = rng.choice([lowest, 0.5, 1, 3], rows).astype("float32")
    return frame


def _labels(objective: Objective, signal: Any, rng: np.random.Generator) -> Any:
    share = 1 / (1 + np.exp(-signal))
    match objective.labels:
        case "real":
            return 10 + 3 * signal
        case "positive" | "time":
            return 0.1 + np.exp(signal) * rng.gamma(2, 1, len(signal))
        case "count":
            return rng.poisson(np.exp(signal - 1))  # so that the loss is far from 0
        case "share":
            return share
        case "binary":
            return (rng.random(len(signal)) < share).astype("float32")
        case "class":
            return np.digitize(signal, [-0.3, 0.6])
        case "grade":
            return np.digitize(signal, [-0.5, 0.2, 0.8, 1.5])


def _with_queries(frame: pd.DataFrame, order: Order, rng: np.random.Generator) -> pd.DataFrame:
    """Add queries. Queries are sorted by the sum of their labels; rows in a query are not."""
    frame["query"] = np.arange(len(frame)) // ROWS_PER_QUERY
    if order == "sorted":
        frame["key"] = frame.groupby("query")["y"].transform("sum")
        frame = frame.sort_values(["key", "query"], kind="stable", ignore_index=True)
        frame = frame.drop(columns="key")
        frame["query"] = np.arange(len(frame)) // ROWS_PER_QUERY
    if order == "weighted":
        weights = rng.choice([0.5, 1, 3], len(frame) // ROWS_PER_QUERY).astype("float32")
        frame["weight"] = weights[frame["query"]]
    return frame
