"""Arrow tables to blocks of numbers, in one pass, with what the other ranks must know of them.

Categories become codes in the order in which this rank meets them; only when all ranks have told
theirs is it known which number each has. So codes are renumbered as the blocks are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.types as is_type

from drawbar._boosting._block import Array, Block, BlockStore, concat_blocks, slice_block
from drawbar._boosting._columns import ColumnRoles

BLOCK_BYTES = 4 << 20
"""How large the features of a block are, at the most about: small beside a shard, large beside the
cost of a call."""

_WIDE = (pa.float64(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64())
"""Types with values that float32 cannot hold."""


@dataclass(frozen=True)
class ColumnFormat:
    """How a library takes columns.

    Args:
        doubles: Features that float32 cannot hold (of doubles, and of integers beyond 16 bits) are
            read as float64. Otherwise all are float32.
        negative_is_missing: Negative integers that are categories are missing values. Otherwise
            they are refused.
    """

    keep_float64: bool = False
    negative_is_missing: bool = False


@dataclass
class LabelRange:
    """What is known of labels: the bounds are infinite, and the wrong way round, if there is none.

    Args:
        low: The smallest.
        high: The largest.
        whole_numbers: Whether there are no others.
        missing: How many are null or NaN.
    """

    low: float = np.inf
    high: float = -np.inf
    whole_numbers: bool = True
    missing: int = 0

    def update(self, labels: Array) -> None:
        """Take note of more labels."""
        known = labels[~np.isnan(labels)]
        self.missing += labels.size - len(known)
        if len(known):
            self.low = min(self.low, float(known.min()))
            self.high = max(self.high, float(known.max()))
            self.whole_numbers = self.whole_numbers and bool((known == np.floor(known)).all())

    def merge(self, other: LabelRange) -> LabelRange:
        """Give the range of two ranks' labels together."""
        return LabelRange(
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            whole_numbers=self.whole_numbers and other.whole_numbers,
            missing=self.missing + other.missing,
        )


@dataclass
class ShardSummary:
    """What a rank tells the others about its part of one dataset.

    Args:
        rows: Number of rows.
        groups: Number of queries.
        features: The features, in their order; None if the rank saw no column at all.
        categories: The values of each feature that has categories by name, in the order of their
            codes here.
        texts: Which of these came as plain strings, so that their order says nothing.
        highest: The highest code of each categorical feature of integers.
        label: Range of the labels.
    """

    rows: int = 0
    groups: int = 0
    features: tuple[str, ...] | None = None
    categories: dict[str, list[object]] = field(default_factory=dict)
    string_features: set[str] = field(default_factory=set)
    max_codes: dict[str, int] = field(default_factory=dict)
    label: LabelRange = field(default_factory=LabelRange)


def read_blocks(
    dataset: str,
    tables: Iterable[pa.Table],
    columns: ColumnRoles,
    store: BlockStore,
    reading: ColumnFormat | None = None,
    *,
    in_object_store: bool = False,
) -> ShardSummary:
    """Read a rank's part of a dataset into a store, in one pass.

    Args:
        dataset: Name of the dataset, for messages.
        tables: Arrow tables, or record batches.
        columns: Which column plays which role.
        store: Where the blocks go.
        reading: How the library takes columns. Default: all as float32.
        in_object_store: Whether the tables lie in Ray's object store. Columns of the type to read,
            without nulls, are then left there. What is in use stays there, or in a file if the
            store is too small (https://docs.ray.io/en/latest/ray-core/objects/object-spilling.html).

    Raises:
        ValueError: The columns cannot be used; the message says which and why.
    """
    reader = BlockReader(dataset, columns, store, reading or ColumnFormat(), in_object_store)
    for table in tables:
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
        pieces = math.ceil(4 * table.num_rows * max(len(features), 1) / BLOCK_BYTES)
        step = math.ceil(table.num_rows / max(pieces, 1))
        for start in range(0, table.num_rows, max(step, 1)):
            piece = table.slice(start, step)
            self._append(self._make_block(piece, features))

    def finish(self) -> ShardSummary:
        self._flush()
        self.summary.categories = {name: list(codes) for name, codes in self._codes.items()}
        return self.summary

    def _check_columns(self, table: pa.Table) -> None:
        if not table.schema.names:
            return  # Ray Data's empty block
        names = table.schema.names
        self._columns.validate(self._dataset, dict(zip(names, table.schema.types, strict=True)))
        found = self._columns.features(names)
        known = self.summary.features
        if known is None:
            self.summary.features = found
        elif set(found) != set(known):
            raise ValueError(
                f"blocks of datasets[{self._dataset!r}] differ in the columns "
                f"{sorted(set(found) ^ set(known))}"
            )

    def _make_block(self, table: pa.Table, names: tuple[str, ...]) -> Block:
        features = tuple(self._convert_feature(name, table[name]) for name in names)
        shared = frozenset(
            number
            for number, name in enumerate(names)
            if self._in_object_store and _shares_memory(table[name], features[number])
        )
        columns = self._columns
        labels = [to_float_array(table[name]) for name in columns.labels]
        label = labels[0] if len(labels) == 1 else np.stack(labels, axis=1)
        self.summary.label.update(label)
        margins = [to_float_array(table[name]) for name in columns.base_margins]
        return Block(
            features=features,
            label=label,
            weight=None if columns.weight is None else to_float_array(table[columns.weight]),
            group=None if columns.group is None else self._number_groups(table[columns.group]),
            base_margin=np.stack(margins, axis=1) if margins else None,
            shared_features=shared,
        )

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
        known = codes[~np.isnan(codes)]
        if not len(known):
            return
        if known.min() < 0 or (known != np.floor(known)).any():
            raise ValueError(
                f"categorical feature {name!r} of datasets[{self._dataset!r}] holds numbers, which "
                f"must be 0, 1, 2 ..., found {known[(known < 0) | (known != np.floor(known))][0]:g}"
            )
        self.summary.max_codes[name] = max(self.summary.max_codes.get(name, 0), int(known.max()))

    def _encode_categories(self, name: str, column: pa.Array | pa.ChunkedArray) -> Array:
        """Give codes of this rank's own; missing is NaN."""
        known = self._codes.setdefault(name, {})
        pieces = [np.empty(0, dtype=np.float32)]
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            values = chunk.dictionary.to_pylist()
            local_codes = np.array(
                [known.setdefault(v, len(known)) for v in values], dtype=np.float32
            )
            codes = chunk.indices.cast(pa.int64()).fill_null(len(local_codes)).to_numpy()
            pieces.append(np.append(local_codes, np.float32(np.nan))[codes])
        return np.concatenate(pieces)

    def _number_groups(self, column: pa.ChunkedArray) -> Array:
        """Number the queries of the next rows."""
        values = column.to_numpy()
        if not len(values):
            return np.empty(0, dtype=np.int64)
        begins = np.append(True, values[1:] != values[:-1])
        if self.summary.groups and values[0] == self._last_group:
            begins[0] = False
        for value in values[begins].tolist():
            if value in self._ended_groups:
                raise ValueError(
                    f"the rows of group {value!r} in column {self._columns.group!r} of "
                    f"datasets[{self._dataset!r}] lie apart; sort the dataset by it, or set "
                    'DataConfig(uneven_rows="keep", group_column=...)'
                )
            self._ended_groups.add(value)
        numbered: Array = self.summary.groups - 1 + np.cumsum(begins)
        self.summary.groups = int(numbered[-1]) + 1
        self._last_group = values[-1]
        return numbered

    def _append(self, block: Block) -> None:
        """Keep whole blocks of about one size; rows of the last query may still follow."""
        self.summary.rows += len(block)
        self._pending.append(block)
        values = sum(len(each) * len(each.features) for each in self._pending)
        if 4 * values < BLOCK_BYTES // 2:
            return
        if self._columns.group is None:
            self._flush()
            return
        whole = concat_blocks(self._pending)
        assert whole.group is not None
        end = int(np.searchsorted(whole.group, whole.group[-1]))
        self._pending = [slice_block(whole, slice(0, end))]
        self._flush()
        self._pending = [slice_block(whole, slice(end, None))]

    def _flush(self) -> None:
        if sum(map(len, self._pending)):
            self._store.append(concat_blocks(self._pending))
        self._pending = []


def to_float_array(column: pa.Array | pa.ChunkedArray, *, doubles: bool = False) -> Array:
    """Give an Arrow column as float32, or as float64 if that is asked for and needed; null is NaN.

    Integers of more than 16 bits need it, as do doubles and decimals.
    """
    wide = column.type in _WIDE or is_type.is_decimal(column.type)
    wanted = pa.float64() if doubles and wide else pa.float32()
    floats = column
    if column.type != wanted:  # a cast imports Arrow's kernels, which takes 0.04 s
        floats = column.cast(wanted, safe=False)
    if isinstance(floats, pa.ChunkedArray):
        one = floats.num_chunks == 1  # combine_chunks() would copy it
        floats = floats.chunk(0) if one else floats.combine_chunks()
    if floats.null_count:
        floats = floats.fill_null(float("nan"))
    return np.from_dlpack(floats)  # to_numpy() would import pandas, which takes 0.2 s


def _shares_memory(column: pa.ChunkedArray, values: Array) -> bool:
    """Whether numbers are a column's own, rather than made of them."""
    return any(
        own is not None and own.address <= values.ctypes.data < own.address + own.size
        for chunk in column.chunks
        for own in chunk.buffers()
    )
