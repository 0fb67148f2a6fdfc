"""Groups: rows with the same value in `DataConfig.group_column`, which stay together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from drawbar._data.dictionaries import decode_dictionary, widen_dictionaries

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray
    from ray.data import Dataset

    from drawbar._data.row_positions import Numbers

_SORT_KEY = "__drawbar_group__"


def check_group_column(name: str, column: str, schema: Any) -> None:
    """Check that a dataset has the column of the groups.

    Raises:
        ValueError: It does not, or the column has nested values.
    """
    names = [] if schema is None else list(schema.names)
    if column not in names:
        raise ValueError(
            f"DataConfig.group_column is {column!r}, but datasets[{name!r}] has "
            f"the columns {', '.join(map(repr, names)) or 'none'}"
        )
    kind = schema.types[names.index(column)]
    if getattr(kind, "num_fields", 0):
        raise ValueError(
            f"DataConfig.group_column is {column!r}, which has type {kind} in "
            f"datasets[{name!r}]. Use a column of numbers, strings, or categories"
        )


def find_group_starts(columns: Iterable[pa.ChunkedArray]) -> tuple[Numbers, bool]:
    """Return where runs of equal values start, and whether each value has only one run.

    Args:
        columns: The values of each block. Nulls are equal to each other.
    """
    import numpy as np
    import pyarrow as pa

    starts, values, rows = [np.empty(0, dtype=np.int64)], [], 0
    for column in columns:
        column_values = decode_dictionary(column)
        new = np.flatnonzero(_differs_from_previous(_number_values(column_values)))
        starts.append(new + rows)
        values.append(pa.table({"value": column_values.take(pa.array(new))}))
        rows += len(column)
    if not rows:
        return starts[0], True
    runs = _number_values(pa.concat_tables(values, promote_options="permissive")["value"])
    is_start = _differs_from_previous(runs)  # a run may continue in the next block
    return np.concatenate(starts)[is_start], len(np.unique(runs)) == is_start.sum()


def _number_values(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return a number for each row, which is the same for rows of the same value."""
    # Not to_numpy(), which replaces a null among integers by a float, and a null category by
    # another category.
    encoded = column.dictionary_encode(null_encoding="encode").combine_chunks()
    numbers: NDArray[Any] = encoded.indices.to_numpy()
    return numbers


def _differs_from_previous(numbers: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    return np.append(np.ones(min(len(numbers), 1), dtype=bool), numbers[1:] != numbers[:-1])


def sort_table(table: pa.Table, column: str) -> pa.Table:
    """Sort a table by the values of a column; nulls are last."""
    import pyarrow.compute

    order = pyarrow.compute.sort_indices(decode_dictionary(table[column]))
    return table.unify_dictionaries().take(order)


def sort_dataset(dataset: Dataset, column: str) -> Dataset:
    """Sort a dataset of Ray Data by the values of a column, and compute it."""
    with_key = dataset.map_batches(
        partial(_add_sort_key, column), batch_format="pyarrow", batch_size=None
    )
    sorted_dataset: Dataset = with_key.sort(_SORT_KEY).drop_columns([_SORT_KEY]).materialize()
    return sorted_dataset


def _add_sort_key(column: str, table: pa.Table) -> pa.Table:
    wide = widen_dictionaries(table)
    return wide.append_column(_SORT_KEY, decode_dictionary(wide[column]))


def iter_column(dataset: Dataset, column: str) -> Iterator[pa.ChunkedArray]:
    """Yield a column of a dataset of Ray Data in blocks."""
    column_dataset: Any = dataset.select_columns([column])  # Ray's types do not know the format
    for table in column_dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
        if table.num_rows:  # an empty block may have no columns
            yield table[column]
