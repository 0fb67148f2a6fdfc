"""Rows as users of scikit-learn have them, on their way to a trainer as a Ray Dataset."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

LABEL, WEIGHT, GROUP = ("__label__", "__weight__", "__group__")
OUTPUT, MARGIN = ("__label_{}__", "__margin_{}__")
"""Columns beside the features; of the last two there are several."""


FeatureData: TypeAlias = Any
"""A NumPy or SciPy array, a pandas or Arrow table, or a Ray Dataset."""

ColumnData: TypeAlias = Any
"""One value per row, array-like, or None. With a Ray Dataset, the name of its column.

Where a row has several, they are columns, or the names of columns.
"""


@dataclass(frozen=True, kw_only=True)
class UserData:
    """Rows to learn from or to evaluate, as the user has them.

    Args:
        features: A NumPy or SciPy array, a pandas or Arrow table; or a Ray Dataset. With that, the
            others are names of its columns.
        label: One value per row, or one for each output.
        weight: One value per row.
        group: The number of rows of each query, in order. For a Ray Dataset, the column with the
            query.
        margin: Where scores start: one value per row, or one for each class.
        classes: What the codes 0, 1, ... of the labels stand for, if a Ray Dataset has it by value.
        missing: The value of features that are missing, besides NaN.
        absent: What a sparse matrix leaves out.
    """

    features: FeatureData
    label: ColumnData
    weight: ColumnData = None
    group: ColumnData = None
    margin: ColumnData = None
    classes: Sequence[object] | None = None
    missing: float = math.nan
    sparse_fill_value: float = 0.0

    @property
    def labels(self) -> list[str]:
        """The columns of the label: one, or one for each output."""
        count = self._num_columns(self.label)
        return [LABEL] if count == 1 else [OUTPUT.format(number) for number in range(count)]

    @property
    def margins(self) -> list[str]:
        """The columns of the margin."""
        if self.margin is None:
            return []
        return [MARGIN.format(number) for number in range(self._num_columns(self.margin))]

    def _num_columns(self, values: ColumnData) -> int:
        """Give how many columns they are."""
        if is_ray_dataset(self.features):
            return len(_as_name_list(values))
        shape = getattr(values, "shape", None) or np.asarray(values).shape
        return shape[1] if len(shape) > 1 else 1

    def feature_names(self, prefix: str) -> list[str]:
        """Give the names of the features: their own, else the prefix and their numbers."""
        names = feature_names(self.features, prefix)
        if not is_ray_dataset(self.features):
            return names
        taken = {self.weight, self.group, *_as_name_list(self.label), *_as_name_list(self.margin)}
        return [name for name in names if name not in taken]

    def role_arguments(self) -> dict[str, Any]:
        """Give a trainer's arguments that say which column is what."""
        labels = self.labels
        return {
            "label_column": labels[0] if len(labels) == 1 else labels,
            "weight_column": None if self.weight is None else WEIGHT,
            "group_column": None if self.group is None else GROUP,
            "base_margin_column": self.margins or None,
        }

    def to_dataset(self, names: Sequence[str], *, by_name: bool) -> Any:
        """Give an Arrow table for the trainer, or what makes a Ray Dataset in it.

        Args:
            names: The names of the training rows' features.
            by_name: Whether features with names of their own keep these, or get the others in turn.
        """
        if is_ray_dataset(self.features):
            if not math.isnan(self.missing):
                raise ValueError(
                    f"missing={self.missing} does not work with a Ray Dataset; make such values "
                    "null, and leave missing out"
                )
            return partial(self._rename_columns)
        own = by_name and has_feature_names(self.features)
        table = to_arrow_table(
            self.features, feature_names(self.features) if own else names, self.sparse_fill_value
        )
        if not math.isnan(self.missing):
            table = _replace_with_null(self.missing, table)
        for name, values in self._iter_columns(table.num_rows):
            if len(values) != table.num_rows:
                raise ValueError(
                    f"the features have {table.num_rows} rows, but {name.strip('_')} has "
                    f"{len(values)} values"
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
            margin = np.asarray(self.margin, dtype=np.float64).reshape(rows, -1, order="F")
            for number in range(margin.shape[1]):
                yield MARGIN.format(number), margin[:, number]

    def _rename_columns(self) -> object:
        """Give the user's dataset with our names for the columns that are no features."""
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
    """A Ray Dataset on its way through a plain classifier, which numbers the labels it is given.

    Args:
        dataset: The rows.
        label: The column with the labels.
        classes: The distinct labels of the training rows, which stand in for the column.
    """

    to_dataset: FeatureData
    label: str
    classes: Any


def fill_missing_columns(rows: Sequence[UserData], *, no_margin: float = 0.0) -> list[UserData]:
    """Give all rows weights and margins if some have: ones, and what means no margin.

    Raises:
        ValueError: A Ray Dataset lacks what others have, or the numbers of their outputs differ.
    """
    outputs = [len(each.labels) for each in rows]
    if len(set(outputs)) > 1:
        found = ", ".join(map(str, outputs[1:]))
        raise ValueError(
            f"y has {outputs[0]} columns in the rows to train on, and {found} in those to evaluate"
        )
    weighted = any(each.weight is not None for each in rows)
    margins = max(len(each.margins) for each in rows)
    return [_fill_columns(each, weighted, np.full(margins, no_margin)) for each in rows]


def _fill_columns(rows: UserData, weighted: bool, margin: Any) -> UserData:
    lacking = [
        name
        for name, lacks in (
            ("weight", weighted and rows.weight is None),
            ("margin", len(margin) > 0 and rows.margin is None),
        )
        if lacks
    ]
    if not lacking:
        return rows
    if is_ray_dataset(rows.features):
        raise ValueError(
            f"a Ray Dataset of this fit has no {' and no '.join(lacking)}, but another data set "
            "has; give all of them one, or none"
        )
    count = len(np.asarray(rows.label))
    given: dict[str, Any] = {"weight": np.ones(count), "margin": np.tile(margin, (count, 1))}
    return replace(rows, **{name: given[name] for name in lacking})


def single_output_data(features: FeatureData, label: ColumnData, **others: Any) -> UserData:
    """Give rows of one output as a plain estimator's `fit` passes them on.

    Raises:
        ValueError: There are several.
    """
    if isinstance(features, EncodedDataset):
        dataset, label, classes = features.to_dataset, features.label, features.classes
        return UserData(features=dataset, label=label, classes=list(classes), **others)
    rows = UserData(features=features, label=label, **others)
    if len(rows.labels) > 1:
        raise ValueError(f"y must have one column, found {len(rows.labels)}")
    return rows


def _as_name_list(columns: ColumnData) -> list[str]:
    """Give the columns of a Ray Dataset that the user has named: one, several or none."""
    return [columns] if isinstance(columns, str) else list(columns or ())


def is_ray_dataset(value: object) -> bool:
    """Whether it is a Ray Dataset; Ray Data is not imported for that."""
    return hasattr(value, "streaming_split")


def feature_names(features: FeatureData, prefix: str = "") -> list[str]:
    """Give the names of the features: those of a table, else the prefix and their numbers."""
    named = getattr(features, "column_names", None)  # Arrow's
    if named is None:
        named = getattr(features, "columns", None)  # those of pandas, and of Ray Data
    if named is not None:
        return [str(name) for name in (named() if callable(named) else named)]
    shape = getattr(features, "shape", None) or np.asarray(features).shape
    return [f"{prefix}{number}" for number in range(shape[1])]


def has_feature_names(features: FeatureData) -> bool:
    """Whether the features have names of their own."""
    return hasattr(features, "columns") or hasattr(features, "column_names")


def to_arrow_table(features: FeatureData, names: Sequence[str], absent: float = 0.0) -> pa.Table:
    """Give features as an Arrow table.

    Args:
        features: A NumPy or SciPy array, a pandas or Arrow table, or what converts to an array.
        names: Of the columns.
        absent: What a SciPy array leaves out.

    Raises:
        ValueError: There are not as many columns as names.
    """
    if isinstance(features, pa.Table):
        table = features
    elif hasattr(features, "iloc"):
        table = pa.Table.from_pandas(features, preserve_index=False)
    else:
        array = _to_dense(features, absent) if hasattr(features, "tocoo") else np.asarray(features)
        if array.dtype.kind not in "fiub":
            array = array.astype(np.float64)
        table = pa.table({str(number): column for number, column in enumerate(array.T)})
    if table.num_columns != len(names):
        raise ValueError(
            f"the rows have {table.num_columns} features, but those to train on have {len(names)}"
        )
    return table.rename_columns(list(names))


def _to_dense(sparse: Any, absent: float) -> Any:
    sparse = sparse.tocsr(copy=True)
    sparse.sum_duplicates()
    entries = sparse.tocoo()
    array = np.full(entries.shape, absent, dtype=np.promote_types(entries.dtype, np.float32))
    array[entries.row, entries.col] = entries.data
    return array


def _replace_with_null(missing: float, table: pa.Table) -> pa.Table:
    """Give a table with null in place of a value, which is compared as float32, as XGBoost does."""
    import pyarrow.compute as pc
    import pyarrow.types as is_type

    for number, column in enumerate(table.columns):
        kinds = (is_type.is_floating, is_type.is_integer, is_type.is_boolean)
        if any(is_kind(column.type) for is_kind in kinds):
            found = pc.equal(
                column.cast(pa.float32(), safe=False), pa.scalar(missing, pa.float32())
            )
            known = pc.if_else(found, None, column)
            table = table.set_column(number, table.column_names[number], known)
    return table


def unique_labels(dataset: FeatureData, label: ColumnData) -> Any:
    """Give the distinct labels of a Ray Dataset, ascending."""
    return np.array(
        sorted({value for name in _as_name_list(label) for value in dataset.unique(name)})
    )


def _encode_labels(classes: Sequence[object], batch: pa.Table) -> pa.Table:
    import pyarrow.compute as pc  # takes 0.04 s, and workers that train import this module

    codes = pc.index_in(batch[LABEL], pa.array(classes).cast(batch[LABEL].type))
    return batch.set_column(batch.schema.get_field_index(LABEL), LABEL, codes)
