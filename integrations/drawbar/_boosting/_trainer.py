"""The trainer of both libraries: around a training function, or around a declared `Fit`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drawbar._boosting._backend import BoostingConfig
from drawbar._boosting._columns import Columns
from drawbar._boosting._fit import Fit
from drawbar._boosting._table import is_table, types_of_table
from drawbar.train import (
    Checkpoint,
    DataConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
)
from drawbar.train.backend import TrainFunction

if TYPE_CHECKING:
    from ray.data import Dataset


COLUMN_ARGUMENTS = {
    "label_column": "label",
    "weight_column": "weight",
    "group_column": "group",
    "base_margin_column": "base_margin",
    "categorical_features": "categorical",
}
"""A trainer's arguments to what they are in `Columns`."""


class BoostingTrainer(DataParallelTrainer):
    """Run a training function, or a declared training, with a library's workers connected.

    Unless `dataset_config` is set, all datasets are split between the workers and every row is
    used. If the objective averages percentiles over the workers, the training rows are shuffled
    before the split. A dataset may be a table: a pandas DataFrame or an Arrow table.

    Args:
        train_loop_per_worker: The training function, if there is one.
        fit_class: The library's declared training.
        declared: The arguments of the declarative form, None where one was not given: those in
            `COLUMN_ARGUMENTS`, and fields of `fit_class`.
        backend_config: How the library's workers meet.

    All other arguments, and what is raised, are those of `drawbar.train.DataParallelTrainer`.
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction | None,
        *,
        fit_class: type[Fit],
        declared: Mapping[str, object],
        backend_config: BoostingConfig,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, object] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, object] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        given = {name: value for name, value in declared.items() if value is not None}
        work: TrainFunction | Fit
        if train_loop_per_worker is None:
            restarts = run_config is not None and run_config.failure_config.max_failures != 0
            work = _declared(fit_class, given, datasets, keep_data=restarts)
        else:
            work = _the_function(train_loop_per_worker, given)
        if dataset_config is None:
            dataset_config = _default_data_config(work, scaling_config)
        elif _needs_random_samples(work, scaling_config) and not dataset_config.shuffles("train"):
            _warn_of_order()
        if isinstance(work, Fit):
            backend_config = backend_config.decided(runs_user_code=work.runs_user_code)
        super().__init__(
            work,
            train_loop_config=train_loop_config,
            backend_config=backend_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            validation_config=validation_config,
        )
        if isinstance(work, Fit):
            work.check(self.scaling_config)
            for name, dataset in self.datasets.items():
                if is_table(dataset):
                    work.columns.check(name, types_of_table(dataset))
                elif hasattr(dataset, "schema"):
                    check_dataset(name, dataset, work.columns)


def _default_data_config(
    work: TrainFunction | Fit, scaling_config: ScalingConfig | None
) -> DataConfig:
    """Split all datasets and use every row; shuffle the training rows if the objective needs it."""
    group = work.columns.group if isinstance(work, Fit) else None
    shuffles = group is None and _needs_random_samples(work, scaling_config)
    return DataConfig(
        datasets_to_split="all",
        equalize="join",
        group_column=group,
        datasets_to_shuffle=("train",) if shuffles else (),
    )


def _needs_random_samples(work: TrainFunction | Fit, scaling_config: ScalingConfig | None) -> bool:
    """Return True if each worker needs a random sample of the training rows."""
    is_split = scaling_config is not None and scaling_config.max_workers > 1
    return is_split and isinstance(work, Fit) and work.averages_percentiles


def _warn_of_order() -> None:
    warnings.warn(
        "The objective averages leaf values over the workers, so each worker needs a random sample "
        'of the rows, but dataset_config does not shuffle "train". Unless the rows are in random '
        "order, set "
        'DataConfig(datasets_to_split="all", equalize="join", datasets_to_shuffle=["train"]).',
        stacklevel=4,
    )


def _the_function(function: TrainFunction, given: Mapping[str, object]) -> TrainFunction:
    if given:
        raise TypeError(
            f"a training function says itself what is trained, so {', '.join(given)} must be "
            "left out, or the function"
        )
    return function


def _declared(
    fit_class: type[Fit],
    given: dict[str, Any],
    datasets: Mapping[str, object] | None,
    *,
    keep_data: bool,
) -> Fit:
    if not {"params", "label_column"} <= set(given):
        raise TypeError("give a training function; or params and label_column, and no function")
    if "train" not in (datasets or {}):
        raise ValueError(f'datasets must have "train", found {sorted(datasets or {}) or "none"}')
    given = fit_class.arguments(given)
    roles = {COLUMN_ARGUMENTS[name]: given.pop(name) for name in COLUMN_ARGUMENTS if name in given}
    return fit_class(
        columns=Columns(**roles),
        datasets=("train", *(name for name in datasets or () if name != "train")),
        keep_data=keep_data,
        **given,
    )


def check_dataset(name: str, dataset: Dataset, columns: Columns) -> None:
    """Check a dataset's columns, as far as they are known before it is computed.

    Raises:
        ValueError: A column is missing, or holds neither numbers nor categories.
    """
    schema = dataset.schema(fetch_if_missing=False)
    if schema is None:
        return
    import pyarrow as pa

    found = schema.base_schema
    types = found.types if isinstance(found, pa.Schema) else [None] * len(schema.names)
    columns.check(name, dict(zip(schema.names, types, strict=True)))
