"""BoostingTrainer: base class of XGBoostTrainer and LightGBMTrainer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from drawbar._boosting.backend import BoostingConfig
from drawbar._boosting.columns import ColumnRoles
from drawbar._boosting.training_spec import TrainingSpec
from drawbar._boosting.user_data import is_ray_dataset
from drawbar.train import (
    Checkpoint,
    DataConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
)
from drawbar.train.backend import DataSource, TrainFunction

if TYPE_CHECKING:
    from ray.data import Dataset


ROLE_BY_ARGUMENT = {
    "label_column": "label",
    "weight_column": "weight",
    "group_column": "group",
    "base_margin_column": "base_margin",
    "categorical_features": "categorical",
}
"""Arguments of a trainer and the corresponding fields of `ColumnRoles`."""


class BoostingTrainer(DataParallelTrainer):
    """Run a training function, or training described by parameters, with connected workers.

    Unless `dataset_config` is set, all datasets are split between the workers and every row is
    used. If the objective averages percentiles over the workers, the training rows are shuffled
    before the split.

    Args:
        train_loop_per_worker: Training function, if there is one.
        backend_config: Configuration of the library's workers.
        spec_arguments: Arguments for training without a function, None for those that are not set:
            the keys of `ROLE_BY_ARGUMENT`, and fields of `_spec_class`.

    Other arguments and errors: see `drawbar.train.DataParallelTrainer`.
    """

    _spec_class: ClassVar[type[TrainingSpec]]
    """The library's subclass of `TrainingSpec`."""

    def __init__(
        self,
        train_loop_per_worker: TrainFunction | None,
        *,
        backend_config: BoostingConfig,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, object] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, object] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
        **spec_arguments: object,
    ) -> None:
        _reject_data_source(datasets)
        arguments = {name: value for name, value in spec_arguments.items() if value is not None}
        spec = None
        if train_loop_per_worker is None:
            restarts = run_config is not None and run_config.failure_config.max_failures != 0
            spec = _make_spec(self._spec_class, arguments, datasets, keep_data=restarts)
            train_loop_per_worker = spec
            backend_config = backend_config.with_resolved_imports(
                runs_user_code=spec.runs_user_code
            )
        else:
            _require_no_spec_arguments(arguments)
        is_split = scaling_config is not None and scaling_config.max_workers > 1
        needs_shuffle = is_split and spec is not None and spec.needs_random_rows
        if dataset_config is None:
            group = None if spec is None else spec.columns.group
            dataset_config = _default_data_config(group, shuffles=needs_shuffle)
        elif needs_shuffle and not dataset_config.shuffles("train"):
            _warn_of_order()
        super().__init__(
            train_loop_per_worker,
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
        if spec is not None:
            spec.validate(self.scaling_config)
            _validate_datasets(self.datasets, spec.columns)


def _reject_data_source(datasets: object) -> None:
    if isinstance(datasets, DataSource):
        raise TypeError(
            f"datasets must be a dict of name to table or dataset, found {datasets!r}. Only "
            "trainers of other frameworks accept a DataSource."
        )


def _default_data_config(group: str | None, *, shuffles: bool) -> DataConfig:
    """Split all datasets and use every row; shuffle the training rows if the objective needs it."""
    return DataConfig(
        datasets_to_split="all",
        uneven_rows="keep",
        group_column=group,
        datasets_to_shuffle=("train",) if shuffles and group is None else (),
    )


def _warn_of_order() -> None:
    warnings.warn(
        "The library averages values of each worker's rows, so each worker needs a random sample "
        'of the rows, but dataset_config does not shuffle "train". Unless the rows are in random '
        "order, set "
        'DataConfig(datasets_to_split="all", uneven_rows="keep", datasets_to_shuffle=["train"]).',
        stacklevel=4,
    )


def _require_no_spec_arguments(arguments: Mapping[str, object]) -> None:
    if arguments:
        raise TypeError(
            f"{', '.join(arguments)} cannot be combined with a training function. Remove the "
            "function, or remove these arguments."
        )


def _make_spec(
    spec_class: type[TrainingSpec],
    arguments: dict[str, Any],
    datasets: Mapping[str, object] | None,
    *,
    keep_data: bool,
) -> TrainingSpec:
    if not {"params", "label_column"} <= set(arguments):
        raise TypeError("Pass either train_loop_per_worker, or params and label_column.")
    if "train" not in (datasets or {}):
        raise ValueError(f'datasets must have "train", found {sorted(datasets or {}) or "none"}.')
    arguments = spec_class.resolve_aliases(arguments)
    roles = {
        ROLE_BY_ARGUMENT[name]: arguments.pop(name)
        for name in ROLE_BY_ARGUMENT
        if name in arguments
    }
    return spec_class(
        columns=ColumnRoles(**roles),
        datasets=("train", *(name for name in datasets or () if name != "train")),
        cache_data=keep_data,
        **arguments,
    )


def _validate_datasets(datasets: Mapping[str, Any], columns: ColumnRoles) -> None:
    for name, dataset in datasets.items():
        if is_ray_dataset(dataset):
            _validate_ray_dataset(name, dataset, columns)
        elif (schema := _get_schema(dataset)) is not None:
            columns.validate(name, dict(zip(schema.names, schema.types, strict=True)))


def _get_schema(table: Any) -> pa.Schema | None:
    """Return the Arrow schema of a table, None if it is not a table, which `fit()` reports."""
    if hasattr(table, "iloc") and hasattr(table, "columns"):  # its stream would convert all rows
        return pa.Schema.from_pandas(table)
    if isinstance(schema := getattr(table, "schema", None), pa.Schema):
        return schema  # a `RecordBatchReader` can be read only once
    if not hasattr(table, "__arrow_c_stream__"):
        return None
    try:
        return pa.RecordBatchReader.from_stream(table).schema
    except pa.ArrowInvalid:  # a single column
        return None


def _validate_ray_dataset(name: str, dataset: Dataset, columns: ColumnRoles) -> None:
    """Check a dataset's columns, as far as they are known before it is computed.

    Raises:
        ValueError: A column is missing, or is neither numeric nor categorical.
    """
    schema = dataset.schema(fetch_if_missing=False)
    if schema is None:
        return
    base_schema = schema.base_schema
    is_arrow = isinstance(base_schema, pa.Schema)
    types = base_schema.types if is_arrow else [None] * len(schema.names)
    columns.validate(name, dict(zip(schema.names, types, strict=True)))
