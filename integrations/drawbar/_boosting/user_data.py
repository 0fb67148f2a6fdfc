"""Convert arrays, tables, and Ray Datasets to datasets of a trainer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

LABEL, WEIGHT, GROUP = ("__label__", "__weight__", "__group__")
OUTPUT, MARGIN = ("__label_{}__", "__margin_{}__")
"""Names of columns that are not features; labels and margins may have several columns."""

_ARGUMENT_DESCRIPTIONS = {
    "weight": "sample weights",
    "margin": "initial scores (base_margin or init_score)",
}

FeatureData: TypeAlias = Any
"""A NumPy or SciPy array, a pandas or Arrow table, or a Ray Dataset."""

ColumnData: TypeAlias = Any
"""Array-like object with one value per row, or None. With a Ray Dataset, the name of a column.

For several values per row: an array with several columns, or a list of column names.
"""


@dataclass(frozen=True, kw_only=True)
class UserData:
    """Rows to train on or to evaluate, as passed by the user.

    Args:
        features: A NumPy or SciPy array, a pandas or Arrow table, or a Ray Dataset. With a Ray
            Dataset, the other arguments are column names.
        label: One value per row, or one for each output.
        weight: One value per row.
        group: Number of rows of each query, in order. With a Ray Dataset, the column of the query.
        margin: Initial scores: one value per row, or one for each class. May be flat.
        margin_order: Order of flat margins of several classes: "C" by rows, like XGBoost, or "F" by
            classes, like LightGBM.
        classes: Distinct labels in a Ray Dataset. Drawbar replaces each label by its index in this
            sequence. None if the labels must not be replaced.
        missing: Value of missing features, in addition to NaN.
        sparse_fill_value: Value of entries that a sparse array omits.
    """

    features: FeatureData
    label: ColumnData
    weight: ColumnData = None
    group: ColumnData = None
    margin: ColumnData = None
    classes: Sequence[object] | None = None
    missing: float = math.nan
    sparse_fill_value: float = 0.0
    margin_order: Literal["C", "F"] = "C"

    def __post_init__(self) -> None:
        """Reshape flat margins of several classes to one column for each class."""
        if self.margin is None or is_ray_dataset(self.features):
            return
        margin, rows = np.asarray(self.margin), len(np.asarray(self.label))
        if margin.ndim > 1 or margin.size == rows:
            return
        if not rows or margin.size % rows:
            raise ValueError(
                f"{_ARGUMENT_DESCRIPTIONS['margin'].capitalize()} have {margin.size} values for "
                f"{rows} rows. Pass one value per row, or one for each row and class."
            )
        object.__setattr__(self, "margin", margin.reshape(rows, -1, order=self.margin_order))

    @property
    def labels(self) -> list[str]:
        """Columns of the label: one, or one for each output."""
        count = self._num_columns(self.label)
        return [LABEL] if count == 1 else [OUTPUT.format(number) for number in range(count)]

    @property
    def margins(self) -> list[str]:
        """Columns of the margin."""
        if self.margin is None:
            return []
        return [MARGIN.format(number) for number in range(self._num_columns(self.margin))]

    def _num_columns(self, values: ColumnData) -> int:
        """Return the number of columns of label or margin values."""
        if is_ray_dataset(self.features):
            return len(_as_name_list(values))
        shape = getattr(values, "shape", None) or np.asarray(values).shape
        return shape[1] if len(shape) > 1 else 1

    def feature_names(self, prefix: str) -> list[str]:
        """Return the feature names of a table, or the prefix with a number for arrays."""
        names = feature_names(self.features, prefix)
        if not is_ray_dataset(self.features):
            return names
        assigned = {
            self.weight,
            self.group,
            *_as_name_list(self.label),
            *_as_name_list(self.margin),
        }
        return [name for name in names if name not in assigned]

    def role_arguments(self) -> dict[str, Any]:
        """Return the trainer's arguments for the roles of columns."""
        labels = self.labels
        return {
            "label_column": labels[0] if len(labels) == 1 else labels,
            "weight_column": None if self.weight is None else WEIGHT,
            "group_column": None if self.group is None else GROUP,
            "base_margin_column": self.margins or None,
        }

    def to_dataset(self, names: Sequence[str], *, by_name: bool) -> Any:
        """Return an Arrow table for the trainer, or a function that creates a Ray Dataset.

        Args:
            names: Feature names of the training rows.
            by_name: Whether named features keep their names. Otherwise, columns are renamed to
                `names` by position.
        """
        if is_ray_dataset(self.features):
            if not math.isnan(self.missing):
                raise ValueError(
                    f"missing={self.missing} is not supported with a Ray Dataset. Replace these "
                    "values with null and remove the argument `missing`."
                )
            return partial(self._rename_columns)
        keeps_names = by_name and has_feature_names(self.features)
        table = to_arrow_table(
            self.features,
            feature_names(self.features) if keeps_names else names,
            self.sparse_fill_value,
        )
        if not math.isnan(self.missing):
            table = _replace_with_null(self.missing, table)
        for name, values in self._iter_columns(table.num_rows):
            if len(values) != table.num_rows:
                raise ValueError(
                    f"The features have {table.num_rows} rows, but {name.strip('_')} has "
                    f"{len(values)} values."
                )
            table = table.append_column(name, pa.array(values))
        return table

    def _iter_columns(self, rows: int) -> Iterator[tuple[str, Any]]:
        label = np.atleast_1d(np.asarray(self.label))
        yield from zip(self.labels, label.T if label.ndim > 1 else [label], strict=True)
        if self.weight is not None:
            yield WEIGHT, np.asarray(self.weight, dtype=np.float64).reshape(-1)
        if self.group is not None:
            sizes = np.asarray(self.group)
            yield GROUP, np.repeat(np.arange(len(sizes)), sizes)
        if self.margin is not None:
            margin = np.asarray(self.margin, dtype=np.float64).reshape(rows, -1)
            for number in range(margin.shape[1]):
                yield MARGIN.format(number), margin[:, number]

    def _rename_columns(self) -> object:
        """Return the user's dataset with reserved names for columns that are not features."""
        names = {self.weight: WEIGHT, self.group: GROUP}
        names |= dict(zip(_as_name_list(self.label), self.labels, strict=True))
        names |= dict(zip(_as_name_list(self.margin), self.margins, strict=True))
        names.pop(None, None)
        dataset = self.features.rename_columns(names)
        if self.classes is None:
            return dataset
        return dataset.map_batches(partial(_encode_labels, self.classes), batch_format="pyarrow")


@dataclass(frozen=True)
class EncodedDataset:
    """Ray Dataset that `fit` of the library's classifier receives as `X` or in `eval_set`.

    The classifier encodes the labels that it receives as `y`. It therefore receives the distinct
    labels as `y`, and Drawbar encodes the label column of the dataset later.

    Args:
        dataset: Rows.
        label: Column with the labels.
        classes: Distinct labels of the training rows.
    """

    dataset: FeatureData
    label: str
    classes: Any


def fill_missing_columns(rows: Sequence[UserData], *, no_margin: float = 0.0) -> list[UserData]:
    """Add weights and margins to all datasets if one of them has any.

    Missing weights are 1, and missing margins are `no_margin`.

    Raises:
        ValueError: A Ray Dataset lacks a column that others have, or numbers of outputs differ.
    """
    outputs = [len(data.labels) for data in rows]
    if len(set(outputs)) > 1:
        others = ", ".join(map(str, outputs[1:]))
        raise ValueError(
            f"y has {outputs[0]} columns in the training rows, but {others} in the rows to "
            "evaluate. Use the same number of columns."
        )
    has_weights = any(data.weight is not None for data in rows)
    margins = max(len(data.margins) for data in rows)
    return [_fill_columns(data, has_weights, np.full(margins, no_margin)) for data in rows]


def _fill_columns(rows: UserData, has_weights: bool, margin: Any) -> UserData:
    missing = [
        name
        for name, is_missing in (
            ("weight", has_weights and rows.weight is None),
            ("margin", len(margin) > 0 and rows.margin is None),
        )
        if is_missing
    ]
    if not missing:
        return rows
    if is_ray_dataset(rows.features):
        names = " and ".join(_ARGUMENT_DESCRIPTIONS[name] for name in missing)
        raise ValueError(
            f"fit() received {names} for some datasets, but not for a Ray Dataset. Pass {names} "
            "for all datasets or for none."
        )
    count = len(np.asarray(rows.label))
    values: dict[str, Any] = {"weight": np.ones(count), "margin": np.tile(margin, (count, 1))}
    return replace(rows, **{name: values[name] for name in missing})


def single_output_data(features: FeatureData, label: ColumnData, **others: Any) -> UserData:
    """Return rows with one output, as passed on by the `fit` of LightGBM's estimator.

    Raises:
        ValueError: There are several outputs.
    """
    if isinstance(features, EncodedDataset):
        dataset, label, classes = features.dataset, features.label, features.classes
        return UserData(features=dataset, label=label, classes=list(classes), **others)
    rows = UserData(features=features, label=label, margin_order="F", **others)
    if len(rows.labels) > 1:
        raise ValueError(f"y must have one column, found {len(rows.labels)}.")
    return rows


def _as_name_list(columns: ColumnData) -> list[str]:
    """Return the names of a Ray Dataset's columns as a list: one, several, or none."""
    return [columns] if isinstance(columns, str) else list(columns or ())


def is_ray_dataset(value: object) -> bool:
    """Return whether a value is a Ray Dataset, without importing Ray Data."""
    return hasattr(value, "streaming_split")


def feature_names(features: FeatureData, prefix: str = "") -> list[str]:
    """Return the feature names of a table, or the prefix with a number for arrays."""
    names = getattr(features, "column_names", None)  # Arrow
    if names is None:
        names = getattr(features, "columns", None)  # pandas and Ray Data
    if names is not None:
        return [str(name) for name in (names() if callable(names) else names)]
    shape = getattr(features, "shape", None) or np.asarray(features).shape
    return [f"{prefix}{number}" for number in range(shape[1])]


def has_feature_names(features: FeatureData) -> bool:
    """Return whether the features have names."""
    return hasattr(features, "columns") or hasattr(features, "column_names")


def to_arrow_table(
    features: FeatureData, names: Sequence[str], fill_value: float = 0.0
) -> pa.Table:
    """Convert features to an Arrow table.

    Args:
        features: A NumPy or SciPy array, a pandas or Arrow table, or an array-like object.
        names: Names of the columns.
        fill_value: Value of entries that a SciPy array omits.

    Raises:
        ValueError: The numbers of columns and names differ.
    """
    if isinstance(features, pa.Table):
        table = features
    elif hasattr(features, "iloc"):
        table = pa.Table.from_pandas(features, preserve_index=False)
    else:
        is_sparse = hasattr(features, "tocoo")
        array = _to_dense(features, fill_value) if is_sparse else np.asarray(features)
        if array.dtype.kind not in "fiub":
            array = array.astype(np.float64)
        table = pa.table({str(number): column for number, column in enumerate(array.T)})
    if table.num_columns != len(names):
        raise ValueError(
            f"The rows have {table.num_columns} features, but the training rows have {len(names)}."
        )
    return table.rename_columns(list(names))


def _to_dense(sparse: Any, fill_value: float) -> Any:
    sparse = sparse.tocsr(copy=True)
    sparse.sum_duplicates()
    entries = sparse.tocoo()
    array = np.full(entries.shape, fill_value, dtype=np.promote_types(entries.dtype, np.float32))
    array[entries.row, entries.col] = entries.data
    return array


def _replace_with_null(missing: float, table: pa.Table) -> pa.Table:
    """Replace a value by null. Values are compared as float32, like in XGBoost."""
    import pyarrow.compute as pc
    import pyarrow.types as is_type

    for number, column in enumerate(table.columns):
        kinds = (is_type.is_floating, is_type.is_integer, is_type.is_boolean)
        if any(is_kind(column.type) for is_kind in kinds):
            is_missing = pc.equal(
                column.cast(pa.float32(), safe=False), pa.scalar(missing, pa.float32())
            )
            filled = pc.if_else(is_missing, None, column)
            table = table.set_column(number, table.column_names[number], filled)
    return table


def unique_labels(dataset: FeatureData, label: ColumnData) -> Any:
    """Return the distinct labels of a Ray Dataset in ascending order.

    Warns if no CPU is free for it, because Ray's warning does not name the settings.
    """
    import ray

    if not ray.available_resources().get("CPU"):
        warnings.warn(
            "Ray Data waits for a free CPU to find the labels: workers of other runs, trials, or "
            "actors hold all CPUs. Training starts when one of them ends. To keep CPUs free, lower "
            "ScalingConfig.num_workers or resources_per_worker of these runs",
            stacklevel=2,
        )
    return np.array(
        sorted({value for name in _as_name_list(label) for value in dataset.unique(name)})
    )


def _encode_labels(classes: Sequence[object], batch: pa.Table) -> pa.Table:
    # Not imported with the module: it takes 0.04 s, and training workers do not need it.
    import pyarrow.compute as pc

    codes = pc.index_in(batch[LABEL], pa.array(classes).cast(batch[LABEL].type))
    return batch.set_column(batch.schema.get_field_index(LABEL), LABEL, codes)
