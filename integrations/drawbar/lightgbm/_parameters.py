"""LightGBM's parameters, by whichever of their names the user has chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightgbm.basic import _ConfigAliases

from drawbar._boosting import Shard, validate_labels, warn_oversubscribed_threads
from drawbar.train import ScalingConfig

_RESERVED = (
    "machines",
    "num_machines",
    "local_listen_port",
    "machine_list_filename",
    "pre_partition",
)
"""What Drawbar sets."""

_TRAINER_ARGUMENTS = {
    "categorical_feature": "the trainer's categorical_features",
    "group_column": "the trainer's group_column",
    "weight_column": "the trainer's weight_column",
    "label_column": "the trainer's label_column",
}
"""What the trainer has an argument for."""

PARAMETER_ALIASES = {
    "num_boost_round": tuple(_ConfigAliases.get("num_iterations")),
    "early_stopping_rounds": tuple(_ConfigAliases.get("early_stopping_round")),
}
"""The trainer's arguments that LightGBM takes from its parameters, under any of these names."""

ROW_WISE_BINS, ROW_WISE_THREADS = 20_000, 16
"""Up to how many bins and threads histograms are added up row by row."""

_INTEGER_PARAMETERS = (
    "num_threads",
    "num_class",
    "max_bin",
    "bin_construct_sample_cnt",
    "data_random_seed",
)
"""What Drawbar itself reckons with."""

_SINGLE_WORKER_ONLY = {
    "linear_tree": "LightGBM trains each worker's own model of its own rows",
    "interaction_constraints": "LightGBM crashes (https://github.com/lightgbm-org/LightGBM/issues/5680)",
}
"""What works in one process only, and what happens otherwise."""

PERCENTILE_OBJECTIVES = (
    *("regression_l1", "l1", "mae", "mean_absolute_error"),
    *("mape", "mean_absolute_percentage_error"),
    "quantile",
)
"""Objectives whose leaf values are percentiles of a worker's rows."""

_CLASSES = ("multiclass", "softmax", "multiclassova", "multiclass_ova", "ova", "ovr")
_RANKS = ("lambdarank", "rank_xendcg", "xendcg", "xe_ndcg", "xe_ndcg_mart", "xendcg_mart")
_PROBABILITIES = ("cross_entropy", "xentropy", "cross_entropy_lambda", "xentlambda")
_COUNTS = ("poisson", "tweedie")


def find_alias(params: Mapping[str, object], name: str) -> str | None:
    """Give the name, or alias, under which a parameter is set; None if it is not.

    LightGBM takes one that is None for not set.
    """
    aliases = _ConfigAliases.get_sorted(name)
    return next((alias for alias in aliases if params.get(alias) is not None), None)


def get_parameter(params: Mapping[str, object], name: str, default: object = None) -> Any:
    """Give a parameter's value, by whichever name it is set."""
    found = find_alias(params, name)
    return default if found is None else params[found]


def drop_parameters(params: Mapping[str, object], *names: str) -> dict[str, object]:
    """Give the parameters without some, by whichever of their names they are set."""
    left_out = {alias for name in names for alias in _ConfigAliases.get(name)}
    return {name: value for name, value in params.items() if name not in left_out}


def choose_histogram_layout(params: Mapping[str, object], features: int) -> dict[str, bool]:
    """Give the parameter that says whether histograms are added up row by row.

    LightGBM left to itself times both ways once, over all rows, before the first round. That takes
    as long as a round or two; it may choose another way on each worker and at each start, and with
    several threads the ways round differently; and deeper in a tree, where a leaf's rows lie apart,
    the way by rows is faster for longer than there. LightGBM recommends it for many rows, few bins
    and at most 16 threads (https://lightgbm.readthedocs.io/en/stable/Parameters.html, at
    `force_row_wise`); how few was measured on two workers: 10 to 80 features of 255 bins took 0.79
    to 0.91 of the time by columns, 160 took 1.08, 640 took 1.15. By rows takes one byte more for
    each value, as does the comparison.

    Args:
        params: LightGBM's parameters, `num_threads` among them.
        features: How many there are.

    Returns:
        `force_row_wise`, or nothing where the choice stays LightGBM's or is made already.
    """
    chosen = any(find_alias(params, name) for name in ("force_row_wise", "force_col_wise"))
    bins = features * int(get_parameter(params, "max_bin", 255))
    threads = int(get_parameter(params, "num_threads"))
    if chosen or get_parameter(params, "device_type", "cpu") != "cpu" or bins > ROW_WISE_BINS:
        return {}
    return {"force_row_wise": True} if 0 < threads <= ROW_WISE_THREADS else {}


def check_parameters(params: Mapping[str, object], scaling_config: ScalingConfig) -> None:
    """Check, in the driver, what does not depend on the data.

    Raises:
        ValueError: A parameter is not for the user to set, or does not work with workers.
    """
    for name in _RESERVED:
        if (found := find_alias(params, name)) is not None:
            raise ValueError(
                f"params[{found!r}] is {params[found]!r}, but the workers' network is Drawbar's; "
                "leave it out"
            )
    for name, instead in _TRAINER_ARGUMENTS.items():
        if (found := find_alias(params, name)) is not None:
            raise ValueError(f"params[{found!r}] is {params[found]!r}; use {instead} instead")
    learner = get_parameter(params, "tree_learner", "data")
    if learner not in ("data", "data_parallel", "voting", "voting_parallel"):
        raise ValueError(
            f"params['tree_learner'] is {learner!r}; on several workers it must be 'data' or "
            "'voting'; LightGBM's Python package has no 'feature'"
        )
    if scaling_config.max_workers > 1:
        _check_distributed(params)
    for name in _INTEGER_PARAMETERS:
        if (found := find_alias(params, name)) is not None and not _is_integer(params[found]):
            raise ValueError(f"params[{found!r}] must be a whole number, found {params[found]!r}")
    warn_oversubscribed_threads("num_threads", get_parameter(params, "num_threads"), scaling_config)


def _check_distributed(params: Mapping[str, object]) -> None:
    for name, reason in _SINGLE_WORKER_ONLY.items():
        if (found := find_alias(params, name)) is not None and params[found]:
            raise ValueError(
                f"params[{found!r}] is {params[found]!r}, but with several workers {reason}; "
                "leave it "
                "out, or train on one worker with more CPUs"
            )


def _is_integer(value: object) -> bool:
    """Whether LightGBM, which is given all as text, reads a whole number: of 3.0 it does not."""
    try:
        int(str(value))
    except ValueError:
        return False
    return True


def check_labels(shard: Shard, params: Mapping[str, object]) -> None:
    """Check the labels of all ranks against the objective.

    Raises:
        ValueError: A label is out of range; every rank gets the same error.
    """
    objective = get_parameter(params, "objective", "regression")
    reason = f"objective {objective!r}"
    if objective == "binary":
        validate_labels(
            shard, reason, low=-1, high=1, whole_numbers=True
        )  # what is above 0 is positive
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
