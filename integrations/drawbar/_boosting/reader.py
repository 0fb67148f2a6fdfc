"""Convert Arrow tables to blocks of numbers in one pass.

Categories get codes in the order in which this rank reads them. Global codes are known only after
all ranks have exchanged their summaries, so codes are converted when blocks are used.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as is_type

from drawbar._boosting.block import Array, Block, BlockStore, concat_blocks, slice_block
from drawbar._boosting.columns import ColumnRoles

BLOCK_BYTES = 4 << 20
"""Approximate maximum size of a block's features. Small compared to a shard, and large enough to
make the cost of a call negligible."""

_WIDE = (pa.float64(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64())
"""Types with values that float32 cannot represent."""


@dataclass(frozen=True)
class ColumnFormat:
    """Column formats that a library accepts.

    Args:
        keep_float64: Whether features that float32 cannot represent (doubles, and integers of more
            than 16 bits) are read as float64. Otherwise, all features are float32.
        negative_is_missing: Whether negative integer categories are missing values. Otherwise, they
            are rejected.
        has_default_margin: Whether the library has a base margin for a dataset in which all of
            them are missing. Otherwise, this dataset is rejected.
    """

    keep_float64: bool = False
    negative_is_missing: bool = False
    has_default_margin: bool = True


@dataclass
class LabelRange:
    """Range of labels. Without labels, `low` is inf and `high` is -inf.

    Args:
        low: Smallest label.
        high: Largest label.
        whole_numbers: Whether all labels are integers.
    """

    low: float = np.inf
    high: float = -np.inf
    whole_numbers: bool = True

    def update(self, labels: Array) -> None:
        """Add labels to the range."""
        valid = labels[~np.isnan(labels)]
        if len(valid):
            self.low = min(self.low, float(valid.min()))
            self.high = max(self.high, float(valid.max()))
            self.whole_numbers = self.whole_numbers and bool((valid == np.floor(valid)).all())

    def merge(self, other: LabelRange) -> LabelRange:
        """Return the combined range of two ranks."""
        return LabelRange(
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            whole_numbers=self.whole_numbers and other.whole_numbers,
        )


@dataclass
class ShardSummary:
    """Summary of a rank's part of a dataset, exchanged between the ranks.

    Args:
        rows: Number of rows.
        groups: Number of queries.
        features: Features in order; None if the rank received no columns.
        categories: Values of each feature with named categories, in the order of this rank's codes.
        string_features: Features that are plain strings, so that the order of values is arbitrary.
        max_codes: Highest code of each categorical feature of integers.
        label: Range of the labels.
        missing: Number of values that are null or NaN in each label, weight, and base margin.
        infinite: Number of values that are infinite as float32 in these columns.
    """

    rows: int = 0
    groups: int = 0
    features: tuple[str, ...] | None = None
    categories: dict[str, list[object]] = field(default_factory=dict)
    string_features: set[str] = field(default_factory=set)
    max_codes: dict[str, int] = field(default_factory=dict)
    label: LabelRange = field(default_factory=LabelRange)
    missing: Counter[str] = field(default_factory=Counter)
    infinite: Counter[str] = field(default_factory=Counter)


def read_blocks(
    dataset: str,
    shard: Any,
    columns: ColumnRoles,
    store: BlockStore,
    reading: ColumnFormat | None = None,
) -> ShardSummary:
    """Read a rank's part of a dataset into a store, in one pass.

    Args:
        dataset: Name of the dataset, for error messages.
        shard: Part of the dataset: `iter_arrow_tables()` returns Arrow tables or record batches,
            and `is_in_object_store` is whether they are in Ray's object store. Columns that need
            no conversion are then not copied. Ray keeps objects in use there, or spills them to
            disk (https://docs.ray.io/en/latest/ray-core/objects/object-spilling.html).
        columns: Roles of the columns.
        store: Destination of the blocks.
        reading: Column formats that the library accepts. Default: float32 for all columns.

    Returns:
        Summary of the part.

    Raises:
        ValueError: A column is invalid.
    """
    reader = BlockReader(
        dataset, columns, store, reading or ColumnFormat(), shard.is_in_object_store
    )
    for table in shard.iter_arrow_tables():
        reader.add(table)
    return reader.finish()


class BlockReader:
    def __init__(
        self,
        dataset: str,
        columns: ColumnRoles,
        store: BlockStore,
        reading: ColumnFormat,
        in_object_store: bool,
    ) -> None:
        self.summary = ShardSummary()
        self._reading = reading
        self._in_object_store = in_object_store
        self._dataset = dataset
        self._columns = columns
        self._store = store
        self._codes: dict[str, dict[object, int]] = {}
        self._pending: list[Block] = []
        self._last_group: object = None
        self._ended_groups: set[object] = set()

    def add(self, table: pa.Table) -> None:
        self._check_columns(table)
        features = self.summary.features or ()
        num_slices = math.ceil(4 * table.num_rows * max(len(features), 1) / BLOCK_BYTES)
        step = math.ceil(table.num_rows / max(num_slices, 1))
        for start in range(0, table.num_rows, max(step, 1)):
            rows = table.slice(start, step)
            self._append(self._make_block(rows, features))

    def finish(self) -> ShardSummary:
        self._flush()
        self.summary.categories = {name: list(codes) for name, codes in self._codes.items()}
        return self.summary

    def _check_columns(self, table: pa.Table) -> None:
        if not table.schema.names:
            return  # an empty block of Ray Data
        names = table.schema.names
        self._columns.validate(self._dataset, dict(zip(names, table.schema.types, strict=True)))
        features = self._columns.features(names)
        known = self.summary.features
        if known is None:
            self.summary.features = features
        elif set(features) != set(known):
            raise ValueError(
                f"All blocks of datasets[{self._dataset!r}] must have the same columns, but only "
                f"some have {sorted(set(features) ^ set(known))}."
            )

    def _make_block(self, table: pa.Table, names: tuple[str, ...]) -> Block:
        features = tuple(self._convert_feature(name, table[name]) for name in names)
        shared = frozenset(
            number
            for number, name in enumerate(names)
            if self._in_object_store and _shares_memory(table[name], features[number])
        )
        columns = self._columns
        labels = [self._read_numbers(table, name) for name in columns.labels]
        label = labels[0] if len(labels) == 1 else np.stack(labels, axis=1)
        self.summary.label.update(label)
        margins = [self._read_numbers(table, name) for name in columns.base_margins]
        return Block(
            features=features,
            label=label,
            weight=None if columns.weight is None else self._read_numbers(table, columns.weight),
            group=None if columns.group is None else self._number_groups(table[columns.group]),
            base_margin=np.stack(margins, axis=1) if margins else None,
            shared_features=shared,
        )

    def _read_numbers(self, table: pa.Table, name: str) -> Array:
        values = to_float_array(table[name])
        self.summary.missing[name] += int(np.isnan(values).sum())
        self.summary.infinite[name] += int(np.isinf(values).sum())
        return values

    def _convert_feature(self, name: str, column: pa.ChunkedArray) -> Array:
        if is_type.is_dictionary(column.type):
            return self._encode_categories(name, column)
        if name not in self._columns.categorical:
            return to_float_array(column, doubles=self._reading.keep_float64)
        if is_type.is_string(column.type) or is_type.is_large_string(column.type):
            self.summary.string_features.add(name)
            return self._encode_categories(name, column.dictionary_encode())
        codes = to_float_array(column)
        if self._reading.negative_is_missing:
            codes = np.where(codes < 0, np.float32(np.nan), codes)
        self._check_codes(name, codes)
        return codes

    def _check_codes(self, name: str, codes: Array) -> None:
        valid = codes[~np.isnan(codes)]
        if not len(valid):
            return
        if valid.min() < 0 or (valid != np.floor(valid)).any():
            invalid = valid[(valid < 0) | (valid != np.floor(valid))][0]
            raise ValueError(
                f"Categorical feature {name!r} of datasets[{self._dataset!r}] must have integers "
                f"from 0, found {invalid:g}."
            )
        self.summary.max_codes[name] = max(self.summary.max_codes.get(name, 0), int(valid.max()))

    def _encode_categories(self, name: str, column: pa.Array | pa.ChunkedArray) -> Array:
        """Return this rank's codes of the values; missing values are NaN."""
        known = self._codes.setdefault(name, {})
        parts = [np.empty(0, dtype=np.float32)]
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            values = chunk.dictionary.to_pylist()
            local_codes = np.array(
                [known.setdefault(v, len(known)) for v in values], dtype=np.float32
            )
            codes = chunk.indices.cast(pa.int64()).fill_null(len(local_codes)).to_numpy()
            parts.append(np.append(local_codes, np.float32(np.nan))[codes])
        return np.concatenate(parts)

    def _number_groups(self, column: pa.ChunkedArray) -> Array:
        """Return the index of each row's query."""
        if is_type.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        missing = column.null_count
        if not missing:  # otherwise, to_numpy() would round large integers
            values = column.to_numpy()
            missing = int(np.isnan(values).sum()) if values.dtype.kind == "f" else 0
        if missing:
            raise ValueError(
                f"{missing} values of group {self._columns.group!r} of "
                f"datasets[{self._dataset!r}] are null or NaN. Drop these rows."
            )
        if not len(values):
            return np.empty(0, dtype=np.int64)
        begins = np.append(True, values[1:] != values[:-1])
        if self.summary.groups and values[0] == self._last_group:
            begins[0] = False
        for value in values[begins].tolist():
            if value in self._ended_groups:
                raise ValueError(
                    f"Rows of group {value!r} (column {self._columns.group!r} of "
                    f"datasets[{self._dataset!r}]) are not contiguous. Sort the dataset by it, or "
                    f'set DataConfig(uneven_rows="keep", group_column={self._columns.group!r}).'
                )
            self._ended_groups.add(value)
        numbered: Array = self.summary.groups - 1 + np.cumsum(begins)
        self.summary.groups = int(numbered[-1]) + 1
        self._last_group = values[-1]
        return numbered

    def _append(self, block: Block) -> None:
        """Store blocks of similar size with complete queries.

        The last query stays pending, because more of its rows may follow.
        """
        self.summary.rows += len(block)
        self._pending.append(block)
        values = sum(len(pending) * len(pending.features) for pending in self._pending)
        if 4 * values < BLOCK_BYTES // 2:
            return
        if self._columns.group is None:
            self._flush()
            return
        rows = concat_blocks(self._pending)
        assert rows.group is not None
        end = int(np.searchsorted(rows.group, rows.group[-1]))
        self._pending = [slice_block(rows, slice(0, end))]
        self._flush()
        self._pending = [slice_block(rows, slice(end, None))]

    def _flush(self) -> None:
        if sum(map(len, self._pending)):
            self._store.append(concat_blocks(self._pending))
        self._pending = []


def to_float_array(column: pa.Array | pa.ChunkedArray, *, doubles: bool = False) -> Array:
    """Convert an Arrow column to float32, or to float64 if `doubles` is set and it is needed.

    Doubles, decimals, and integers of more than 16 bits need float64. Null becomes NaN.
    """
    is_wide = column.type in _WIDE or is_type.is_decimal(column.type)
    target_type = pa.float64() if doubles and is_wide else pa.float32()
    floats = column
    if column.type != target_type:  # a cast imports Arrow's kernels, which takes 0.04 s
        floats = column.cast(target_type, safe=False)
    if isinstance(floats, pa.ChunkedArray):
        is_single = floats.num_chunks == 1  # combine_chunks() would copy it
        floats = floats.chunk(0) if is_single else floats.combine_chunks()
    if floats.null_count:
        floats = floats.fill_null(float("nan"))
    return np.from_dlpack(floats)  # to_numpy() would import pandas, which takes 0.2 s


def _shares_memory(column: pa.ChunkedArray, values: Array) -> bool:
    """Return whether an array shares the memory of a column."""
    return any(
        buffer is not None and buffer.address <= values.ctypes.data < buffer.address + buffer.size
        for chunk in column.chunks
        for buffer in chunk.buffers()
    )
