"""Detect weights with which XGBoost trains another model on several workers than in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from xgboost import DMatrix

from drawbar.train import collective, get_context
from drawbar.xgboost._parameters import PERCENTILE_OBJECTIVES


@dataclass(frozen=True)
class WorkerWeights:
    """Weights of a worker's training rows.

    Args:
        positive_rows: Number of rows of positive weight.
        mean_query_weight: Mean weight of the queries, 1 without weights. None if it has no effect,
            because each query has one row.
    """

    positive_rows: int
    mean_query_weight: float | None


def validate_worker_weights(params: Mapping[str, object], matrix: DMatrix) -> None:
    """Check the weights of all ranks' training rows against the objective.

    Collective: call it on all ranks.

    Raises:
        ValueError: The model would differ from one that a single process trains. Every rank raises
            the same error.
    """
    objective = str(params.get("objective"))
    is_percentile, is_ranking = objective in PERCENTILE_OBJECTIVES, objective.startswith("rank:")
    if get_context().get_world_size() == 1 or not (is_percentile or is_ranking):
        return
    ranks: list[WorkerWeights] = collective.all_gather(_summarize(matrix))
    if is_percentile:
        _require_positive_rows(objective, [rank.positive_rows for rank in ranks])
    else:
        _require_equal_means(objective, [rank.mean_query_weight for rank in ranks])


def _summarize(matrix: DMatrix) -> WorkerWeights:
    weights = matrix.get_weight()
    rows, queries = matrix.num_row(), len(matrix.get_uint_info("group_ptr")) - 1
    has_pairs = rows > max(queries, 1)
    mean = float(np.mean(weights, dtype=np.float64)) if weights.size else 1.0
    return WorkerWeights(
        positive_rows=int((weights > 0).sum()) if weights.size else rows,
        mean_query_weight=mean if has_pairs or not mean else None,
    )


def _require_positive_rows(objective: str, rows: Sequence[int]) -> None:
    if 0 in rows:
        raise ValueError(
            f"objective {objective!r} averages percentiles over the workers, but worker "
            f"{rows.index(0)} of {len(rows)} has no row of positive weight. Set num_workers to at "
            f"most {max(len(rows) - rows.count(0), 1)}."
        )


def _require_equal_means(objective: str, means: Sequence[float | None]) -> None:
    """XGBoost divides the weights of a worker's queries by their mean."""
    known = [mean for mean in means if mean is not None]
    if any(not math.isclose(mean, known[0], rel_tol=1e-6) for mean in known) or 0 in known:
        shown = ", ".join("none" if mean is None else f"{mean:.4g}" for mean in means)
        raise ValueError(
            f"objective {objective!r} with different query weights cannot be trained on several "
            "workers: XGBoost divides each worker's weights by their mean, and the means are "
            f"{shown}. Set num_workers=1, or remove the weights."
        )
