"""The start score of all rows, as in one process.

LightGBM averages the start scores of the workers without weights, even logarithms of means. Here,
the start score is computed from the rows of all workers, and every row has it as its initial score.
After the first round, it is added to the first tree, where LightGBM also stores it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from lightgbm import Booster
from lightgbm.callback import CallbackEnv

from drawbar._boosting.shard import Shard
from drawbar.lightgbm._parameters import check_rank_weights, get_parameter, is_forest
from drawbar.train import collective, get_context


def _identity(mean: float) -> float:
    return mean


def _log(mean: float) -> float:
    return math.log(mean) if mean > 0 else -math.inf


def _logit(mean: float) -> float:
    mean = min(max(mean, 1e-15), 1 - 1e-15)
    return math.log(mean / (1 - mean))


def _log_expm1(mean: float) -> float:
    return _log(math.expm1(mean))


_SQUARED_ERRORS = (
    *("regression", "regression_l2", "l2", "mean_squared_error", "mse"),
    *("l2_root", "root_mean_squared_error", "rmse"),
)

_LINKS: dict[str, Callable[[float], float]] = {
    **dict.fromkeys((*_SQUARED_ERRORS, "huber", "fair"), _identity),
    **dict.fromkeys(("poisson", "tweedie", "gamma"), _log),
    **dict.fromkeys(("cross_entropy", "xentropy"), _logit),
    **dict.fromkeys(("cross_entropy_lambda", "xentlambda"), _log_expm1),
}
"""Function of the mean label that is the start score, by objective."""


def compute_start_score(shard: Shard, params: Mapping[str, object]) -> float | None:
    """Return the start score of all rows; None if LightGBM sets it or there is none. Collective.

    Raises:
        ValueError: LightGBM needs rows with weight on every rank, or on any.
    """
    objective = get_parameter(params, "objective", "regression")
    link = None if callable(objective) else _LINKS.get(objective)
    has_weight = any(block.weight is None or np.any(block.weight) for block in shard)
    has_effect = get_context().get_world_size() > 1 and not is_forest(params)
    if link is None or not has_effect or not _is_set(params, "boost_from_average", True):
        check_rank_weights(has_weight, params)
        return None
    if link in (_logit, _log_expm1):
        check_rank_weights(has_weight, params)
    if shard.columns.base_margins:
        return None
    has_root = objective in _SQUARED_ERRORS and _is_set(params, "reg_sqrt", False)
    total = weights = 0.0
    for block in shard:
        label = np.asarray(block.label, np.float64)
        label = np.sign(label) * np.sqrt(np.abs(label)) if has_root else label
        weight = np.ones(len(label)) if block.weight is None else block.weight.astype(np.float64)
        total += float(label @ weight)
        weights += float(weight.sum())
    sums = collective.all_gather((total, weights))
    all_weights = math.fsum(weight for _, weight in sums)
    if not all_weights:
        check_rank_weights(has_weight, params)
    return link(math.fsum(label for label, _ in sums) / all_weights)


@dataclass(frozen=True)
class StartScoreCallback:
    """LightGBM callback that adds the start score to the first tree, before other callbacks.

    Args:
        start_score: Initial score of all rows.
    """

    order: ClassVar[float] = -math.inf

    start_score: float

    def __call__(self, env: CallbackEnv) -> None:
        """Change the leaves after the first round. The scores of the rows are right already."""
        if env.iteration > 0:
            return
        assert isinstance(env.model, Booster)
        tree = env.model.dump_model(num_iteration=1)["tree_info"][0]
        for leaf in range(tree["num_leaves"]):
            value = env.model.get_leaf_output(0, leaf) + self.start_score
            env.model.set_leaf_output(0, leaf, value)


def _is_set(params: Mapping[str, object], name: str, default: bool) -> bool:
    return str(get_parameter(params, name, default)).lower() in ("true", "1", "+")
