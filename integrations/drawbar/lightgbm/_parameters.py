"""Look up, validate, and complete LightGBM parameters under any alias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drawbar._boosting.shard import Shard
from drawbar._boosting.threads import warn_oversubscribed_threads
from drawbar._boosting.training_spec import validate_labels
from drawbar.lightgbm._compat import ConfigAliases
from drawbar.train import ScalingConfig, collective

_RESERVED = (
    "machines",
    "num_machines",
    "local_listen_port",
    "machine_list_filename",
    "pre_partition",
)
"""Parameters that Drawbar sets."""

_TRAINER_ARGUMENTS = {
    "categorical_feature": "the trainer's categorical_features",
    "group_column": "the trainer's group_column",
    "weight_column": "the trainer's weight_column",
    "label_column": "the trainer's label_column",
}
"""Parameters that are arguments of the trainer."""

ROW_WISE_BINS, ROW_WISE_THREADS = 20_000, 16
"""Maximum numbers of bins and threads for which histograms are computed row-wise."""

_INTEGER_PARAMETERS = (
    "num_threads",
    "num_class",
    "max_bin",
    "bin_construct_sample_cnt",
    "data_random_seed",
)
"""Integer parameters that Drawbar uses."""

_SINGLE_WORKER_ONLY = {
    "linear_tree": "LightGBM trains a separate model on each worker",
    "interaction_constraints": "LightGBM crashes (https://github.com/lightgbm-org/LightGBM/issues/5680)",
}
"""Parameters that need a single process, and the effect with several workers."""

_PERCENTILES = (
    *("regression_l1", "l1", "mae", "mean_absolute_error"),
    *("mape", "mean_absolute_percentage_error"),
    "quantile",
)

_CLASSES = ("multiclass", "softmax", "multiclassova", "multiclass_ova", "ova", "ovr")
_RANKS = ("lambdarank", "rank_xendcg", "xendcg", "xe_ndcg", "xe_ndcg_mart", "xendcg_mart")
_PROBABILITIES = ("cross_entropy", "xentropy", "cross_entropy_lambda", "xentlambda")
_COUNTS = ("poisson", "tweedie")
_FORESTS = ("rf", "random_forest")

_EXACT_START = ("binary", *_CLASSES, *_RANKS, "none", "null", "custom", "na")
"""Objectives that have no start score, or one that LightGBM computes from all rows."""


def get_argument_aliases() -> dict[str, tuple[str, ...]]:
    """Return arguments of the trainer and their aliases in LightGBM's parameters."""
    return {
        "num_boost_round": tuple(ConfigAliases.get("num_iterations")),
        "early_stopping_rounds": tuple(ConfigAliases.get("early_stopping_round")),
    }


def find_alias(params: Mapping[str, object], name: str) -> str | None:
    """Return the name or alias under which a parameter is set; None if it is not set.

    A value of None counts as not set, as in LightGBM.
    """
    aliases = ConfigAliases.get_sorted(name)
    return next((alias for alias in aliases if params.get(alias) is not None), None)


def get_parameter(params: Mapping[str, object], name: str, default: object = None) -> Any:
    """Return the value of a parameter under any alias."""
    alias = find_alias(params, name)
    return default if alias is None else params[alias]


def drop_parameters(params: Mapping[str, object], *names: str) -> dict[str, object]:
    """Return the parameters without some of them, under any alias."""
    dropped = {alias for name in names for alias in ConfigAliases.get(name)}
    return {name: value for name, value in params.items() if name not in dropped}


def choose_histogram_layout(params: Mapping[str, object], features: int) -> dict[str, bool]:
    """Return the parameter for row-wise histograms if they are faster.

    By default, LightGBM measures both methods over all rows before the first round. This takes as
    long as one or two rounds, may select different methods on each worker and at each start, and
    with several threads, their rounding differs. Deeper in a tree, where the rows of a leaf are
    scattered, row-wise histograms are faster for more features than in the measurement. LightGBM
    recommends them for many rows, few bins, and at most 16 threads
    (https://lightgbm.readthedocs.io/en/stable/Parameters.html, `force_row_wise`). Measured with
    two workers and 255 bins, relative to column-wise: 0.79 to 0.91 of the time for 10 to 80
    features, 1.08 for 160, 1.15 for 640. Row-wise histograms, and LightGBM's measurement, need one
    more byte per value.

    Args:
        params: LightGBM's parameters, including `num_threads`.
        features: Number of features.

    Returns:
        `force_row_wise`, or nothing if LightGBM should choose or the parameters already do.
    """
    is_set = any(find_alias(params, name) for name in ("force_row_wise", "force_col_wise"))
    bins = features * int(get_parameter(params, "max_bin", 255))
    threads = int(get_parameter(params, "num_threads"))
    if is_set or get_parameter(params, "device_type", "cpu") != "cpu" or bins > ROW_WISE_BINS:
        return {}
    return {"force_row_wise": True} if 0 < threads <= ROW_WISE_THREADS else {}


def check_parameters(params: Mapping[str, object], scaling_config: ScalingConfig) -> None:
    """Check the parameters in the driver, as far as they do not depend on the data.

    Raises:
        ValueError: A parameter is reserved, or does not work with several workers.
    """
    for name in _RESERVED:
        if (alias := find_alias(params, name)) is not None:
            raise ValueError(f"params[{alias!r}] is set by Drawbar. Remove it.")
    for name, argument in _TRAINER_ARGUMENTS.items():
        if (alias := find_alias(params, name)) is not None:
            raise ValueError(
                f"params[{alias!r}]={params[alias]!r} is not supported. Use {argument} instead."
            )
    check_tree_learner(
        "params['tree_learner']",
        get_parameter(params, "tree_learner", "data"),
        scaling_config.max_workers,
    )
    if (alias := find_alias(params, "forcedbins_filename")) is not None and params[alias]:
        raise ValueError(
            f"params[{alias!r}]={params[alias]!r} is not supported by LightGBMTrainer(params=...). "
            "Use a training function, or round the values of the feature before training."
        )
    check_num_workers(params, scaling_config.max_workers)
    for name in _INTEGER_PARAMETERS:
        if (alias := find_alias(params, name)) is not None and not _is_integer(params[alias]):
            raise ValueError(f"params[{alias!r}] must be an integer, found {params[alias]!r}.")
    warn_oversubscribed_threads("num_threads", get_parameter(params, "num_threads"), scaling_config)


def check_tree_learner(name: str, value: object, workers: int) -> None:
    """Check a value of `tree_learner`. LightGBM uses "serial" for one worker with every value.

    Args:
        name: Name of the value in the error.
        value: The value, also with the suffix `_parallel`.
        workers: Maximum number of workers.

    Raises:
        ValueError: LightGBM's Python package does not support the value for as many workers.
    """
    if value in ("data", "data_parallel", "voting", "voting_parallel"):
        return
    if value == "serial" and workers <= 1:
        return
    reason = (
        "'serial' needs a single worker."
        if value == "serial"
        else "LightGBM's Python package does not support 'feature'."
    )
    raise ValueError(f"{name} must be 'data' or 'voting', found {value!r}. {reason}")


def check_num_workers(params: Mapping[str, object], num_workers: int) -> None:
    """Check parameters that LightGBM supports only in one process.

    Raises:
        ValueError: There are several workers and one of these parameters is set.
    """
    if num_workers == 1:
        return
    for name, reason in _SINGLE_WORKER_ONLY.items():
        if (alias := find_alias(params, name)) is not None and params[alias]:
            raise ValueError(
                f"params[{alias!r}]={params[alias]!r} needs a single worker: with several, "
                f"{reason}. Remove it, or set num_workers=1."
            )
    alias = find_alias(params, "monotone_constraints_method")
    if alias is not None and params[alias] != "basic":
        raise ValueError(
            f"params[{alias!r}]={params[alias]!r} needs a single worker: with several, LightGBM "
            "uses 'basic' instead. Set it to 'basic', or set num_workers=1."
        )


def _is_integer(value: object) -> bool:
    """Return whether LightGBM reads a value, as text, as an integer. It does not accept 3.0."""
    try:
        int(str(value))
    except ValueError:
        return False
    return True


def is_forest(params: Mapping[str, object]) -> bool:
    """Return whether the trees are a random forest.

    Each has its own start score. LightGBM cannot add earlier trees, so that training always starts
    from scratch.
    """
    return get_parameter(params, "boosting") in _FORESTS


def needs_random_rows(params: Mapping[str, object]) -> bool:
    """Return whether each worker needs a random sample of the rows.

    LightGBM averages a percentile of each worker's rows in every leaf, or in a forest, the start
    scores of the workers. It also rejects counts that are all 0 on one worker.
    """
    objective = get_parameter(params, "objective")
    averages_starts = is_forest(params) and not has_exact_start(params)
    return objective in (*_PERCENTILES, *_COUNTS) or averages_starts


def has_exact_start(params: Mapping[str, object]) -> bool:
    """Return whether there is no start score, or LightGBM computes it from all rows."""
    objective = get_parameter(params, "objective", "regression")
    return callable(objective) or objective in _EXACT_START


def check_rank_weights(has_weight: bool, params: Mapping[str, object]) -> None:
    """Check that LightGBM does not use a value of a rank without weight. Collective.

    LightGBM averages the start scores of the workers and ignores their weights. It does so even
    with `boost_from_average=False` if the first tree has no split. Cross-entropies need weight.

    Args:
        has_weight: Whether this rank has a training row with a weight above 0.
        params: LightGBM's parameters.

    Raises:
        ValueError: A rank has no weight. Every rank raises the same error.
    """
    ranks = [rank for rank, found in enumerate(collective.all_gather(has_weight)) if not found]
    objective = get_parameter(params, "objective", "regression")
    if not ranks or has_exact_start(params):
        return
    reason = (
        f"LightGBM's objective {objective!r} needs them on every rank"
        if objective in _PROBABILITIES
        else f"LightGBM averages the start scores of all ranks for objective {objective!r}, so the "
        "model would be wrong"
    )
    raise ValueError(
        f"Ranks {ranks} have no rows with a weight above 0, but {reason}. Use fewer workers, or "
        "remove rows of weight 0."
    )


def check_labels(shard: Shard, params: Mapping[str, object]) -> None:
    """Check the labels of all ranks against the objective.

    Raises:
        ValueError: A label is out of range. Every rank raises the same error.
    """
    objective = get_parameter(params, "objective", "regression")
    reason = f"objective {objective!r}"
    if objective == "binary":
        # Labels above 0 are positive.
        validate_labels(shard, reason, low=-1, high=1, whole_numbers=True)
    elif objective in _CLASSES:
        classes = int(get_parameter(params, "num_class", 1))
        reason = f"{reason} with num_class {classes}"
        validate_labels(shard, reason, low=0, high=classes - 1, whole_numbers=True)
    elif objective in _RANKS:
        gains = get_parameter(params, "label_gain")
        highest = len(gains) - 1 if isinstance(gains, list | tuple) else 30
        validate_labels(shard, reason, low=0, high=highest, whole_numbers=True)
    elif objective in _PROBABILITIES:
        validate_labels(shard, reason, low=0, high=1)
    elif objective in _COUNTS:
        validate_labels(shard, reason, low=0)
