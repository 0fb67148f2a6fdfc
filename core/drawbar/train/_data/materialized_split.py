"""Splits that leave no row out: consecutive parts of a dataset, the same in every attempt.

A streamed split hands out equally many rows to readers who all read at the same time. Where each
row counts, where rows belong together, or where one worker reads its part again while the others go
on, a dataset is computed once instead, and cut by row numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from drawbar.train._config.data_config import DataConfig
from drawbar.train._data.local_shuffle import shuffled_rows, take_rows
from drawbar.train._data.shuffling import shuffle_dataset
from drawbar.train._row_positions import (
    NumberedRows,
    RowPosition,
    RowRanges,
    Segment,
    UnevenRows,
    split_rows,
)

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import ray
    from numpy.typing import NDArray
    from ray.data import Dataset


class MaterializedShard:
    """One rank's rows of a computed dataset: its `ray.data.DataIterator`, and the blocks behind it.

    Every attribute but `iter_arrow_tables` and `is_in_object_store` is the iterator's.
    """

    def __init__(self, part: Dataset) -> None:
        import ray

        self._block_refs = _get_arrow_blocks(part)
        self._iterator_ref = ray.put(part.iterator())

    @cached_property
    def _iterator(self) -> Any:  # a DataIterator; Ray's own annotation forbids batch_size=None
        """The iterator; a worker that does not ask for it need not import Ray Data."""
        import ray

        return ray.get(self._iterator_ref)

    @property
    def is_in_object_store(self) -> bool:
        """Whether the tables that `iter_arrow_tables` gives lie in Ray's object store."""
        return self._block_refs is not None

    def iter_arrow_tables(self) -> Iterator[pa.Table]:
        """Give the rows as Arrow tables, in a new pass.

        Blocks that are Arrow tables come straight from the object store, without a copy, and
        without Ray Data, whose import and execution would take a worker a second or two.
        """
        import ray

        if self._block_refs is None:
            yield from self._iterator.iter_batches(batch_size=None, batch_format="pyarrow")
            return
        for number, block in enumerate(self._block_refs):
            ahead = self._block_refs[number + 1 : number + 2]
            if ahead:
                ray.wait(ahead, timeout=0)  # it is on its way here while this one is used
            yield ray.get(block)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of this object, which may just be unpickled
            raise AttributeError(name)
        return getattr(self._iterator, name)


class SlicedShard(MaterializedShard):
    """One rank's rows of blocks that others have rows of too.

    The tables are views of the blocks. The iterator, in the worker that asks for it, puts the rows
    into the object store once more, which takes no task and no CPU.

    Args:
        slices: The blocks, and which of their rows: (block, first, one after the last).
    """

    def __init__(self, slices: Sequence[tuple[ray.ObjectRef[pa.Table], int, int]]) -> None:
        self._slices = slices

    @cached_property
    def _iterator(self) -> Any:
        import ray.data

        part = ray.data.from_blocks(list(self.iter_arrow_tables()))
        part.context.execution_options.preserve_order = True
        part.context.enable_progress_bars = False
        return part.iterator()

    @property
    def is_in_object_store(self) -> bool:
        """Whether the tables that `iter_arrow_tables` gives lie in Ray's object store."""
        return True

    def iter_arrow_tables(self) -> Iterator[pa.Table]:
        """Give the rows as Arrow tables, in a new pass."""
        import ray

        for block, low, high in self._slices:
            yield ray.get(block).slice(low, high - low)


def _get_arrow_blocks(part: Dataset) -> list[ray.ObjectRef[pa.Table]] | None:
    """Give the blocks of a computed dataset; None if they are not Arrow tables."""
    import pyarrow as pa

    schema = part.schema()
    is_arrow = schema is not None and isinstance(schema.base_schema, pa.Schema)
    return part.to_arrow_refs() if is_arrow else None


class MaterializedSplits:
    """The datasets of a run that are split exactly, each computed when it is first asked for."""

    def __init__(self) -> None:
        self._datasets: dict[str, Dataset] = {}
        self._group_starts: dict[str, NDArray[np.int64]] = {}
        self._blocks: dict[str, tuple[list[ray.ObjectRef[pa.Table]], list[int]]] = {}
        self._shards: dict[tuple[str, int], list[MaterializedShard]] = {}

    def get_shards(
        self, name: str, dataset: Dataset, config: DataConfig, world_size: int
    ) -> list[MaterializedShard]:
        """Give each rank's part of a dataset.

        Ray Data needs CPUs for it: it is done for the sizes that the group may have before the
        workers take them, and given again after that.

        Args:
            name: Its name in the trainer's datasets.
            dataset: What to compute, unless it has been already.
            config: Which column keeps rows together.
            world_size: Number of parts.

        Raises:
            ValueError: The dataset has no such column.
        """
        if name not in self._datasets:
            self._materialize(name, dataset, config)
        if (name, world_size) not in self._shards:
            whole = self._datasets[name]
            check_has_rows(name, whole.count(), 1)
            check_even_rows(name, whole.count(), world_size, config.uneven_rows)
            if config.uneven_rows == "pad":
                windows = split_rows(whole.count(), world_size, "pad")
                self._shards[name, world_size] = [
                    self._slice_blocks(name, [range(low, high)]) for low, high in windows
                ]
                return self._shards[name, world_size]
            cuts = compute_split_indices(whole.count(), world_size, self._group_starts.get(name))
            parts = whole.split_at_indices(cuts) if cuts else [whole]
            for part in parts:  # each reader would show a bar for a part that is there already
                part.context.enable_progress_bars = False
            self._shards[name, world_size] = [MaterializedShard(part) for part in parts]
        return self._shards[name, world_size]

    def count(self, name: str) -> int:
        """Count the rows of a dataset that is computed."""
        rows: int = self._datasets[name].count()
        return rows

    def get_unread_shards(
        self, name: str, uneven_rows: UnevenRows, world_size: int, position: RowPosition
    ) -> list[MaterializedShard] | None:
        """Return each rank's unread rows of the epoch that a position is in.

        Returns:
            None if the row numbers are unknown, since rows are kept in groups. The epoch then
            restarts from its beginning.
        """
        if name not in self._blocks or name in self._group_starts:
            return None
        _, counts = self._blocks[name]
        rows = NumberedRows(counts, uneven_rows, partial(shuffled_rows, epoch=position.epoch))
        return [
            self._slice_blocks(name, each)
            for each in rows.split_unread(position.rows_read, world_size)
        ]

    def _slice_blocks(self, name: str, segments: Sequence[Segment]) -> MaterializedShard:
        """Return rows of a dataset as a part. Shuffled rows are copied into the object store."""
        import ray

        blocks, counts = self._blocks[name]
        slices: list[tuple[ray.ObjectRef[pa.Table], int, int]] = []
        for segment in segments:
            if isinstance(segment, range):
                slices += self._slices_of(name, segment)
            else:
                table = take_rows(blocks, counts, segment)
                slices.append((ray.put(table), 0, table.num_rows))
        return SlicedShard(slices or [(blocks[0], 0, 0)])

    def _slices_of(self, name: str, rows: range) -> list[tuple[ray.ObjectRef[pa.Table], int, int]]:
        """Return where a range of rows is stored: (block, first row, one after the last)."""
        blocks, counts = self._blocks[name]
        ends = itertools.accumulate(counts)
        return [
            (block, max(rows.start - end + count, 0), min(rows.stop - end + count, count))
            for block, count, end in zip(blocks, counts, ends, strict=True)
            if end - count < rows.stop and rows.start < end
        ]

    def _materialize(self, name: str, dataset: Dataset, config: DataConfig) -> None:
        group_column = config.group_column
        if config.shuffles(name):
            dataset = shuffle_dataset(dataset)
        whole = dataset.materialize()
        # Row numbers are only known in Arrow blocks. pandas blocks become Arrow blocks.
        if group_column is None and _get_arrow_blocks(whole) is None:
            whole = whole.map_batches(_return_unchanged, batch_format="pyarrow").materialize()
        if group_column is not None:
            _check_column(name, group_column, whole.columns() or [])
            starts, contiguous = find_group_starts(_iter_column(whole, group_column))
            if not contiguous:
                whole = whole.sort(group_column).materialize()
                starts, _ = find_group_starts(_iter_column(whole, group_column))
            self._group_starts[name] = starts
        self._datasets[name] = whole
        blocks = _get_arrow_blocks(whole)
        if blocks:
            self._blocks[name] = blocks, _count_block_rows(whole)


def _return_unchanged(table: pa.Table) -> pa.Table:
    return table


def _count_block_rows(dataset: Dataset) -> list[int]:
    """Count the rows of each block of a computed dataset."""
    entries = [each for bundle in dataset.iter_internal_ref_bundles() for each in bundle.blocks]
    # Before Ray 2.60 an entry was a pair.
    found: list[Any] = [each[1] if isinstance(each, tuple) else each.metadata for each in entries]
    return [each.num_rows for each in found]


def check_has_rows(name: str, rows: int, num_workers: int) -> None:
    """Refuse a dataset that gives no worker a row.

    Args:
        name: Of the dataset.
        rows: That it has.
        num_workers: So many workers get equally many; 1 where they need not.

    Raises:
        ValueError: There are fewer rows than that, or none.
    """
    if not rows:
        raise ValueError(f"datasets[{name!r}] has no rows")
    if rows < num_workers:
        raise ValueError(
            f"datasets[{name!r}] has {rows} row{'s' * (rows > 1)} for {num_workers} workers: none "
            "gets "
            "one, since all get equally many; start fewer workers, or set DataConfig.uneven_rows"
        )


def check_even_rows(name: str, rows: int, world_size: int, uneven_rows: UnevenRows) -> None:
    """Refuse rows that the ranks cannot share equally, if that is asked for.

    Raises:
        ValueError: They cannot. The message has what each rank would get.
    """
    if uneven_rows != "error" or not rows % world_size:
        return
    counts = [high - low for low, high in split_rows(rows, world_size, "keep")]
    most = max(counts)
    groups = [
        f"{count} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        for count in (most, most - 1)
        if (ranks := [rank for rank, each in enumerate(counts) if each == count])
    ]
    raise ValueError(
        f"DataConfig.uneven_rows='strict', but datasets[{name!r}] has {rows} rows, which "
        f"{world_size} workers cannot share equally: {', '.join(groups)}. Workers that wait for "
        "each other at each batch could hang. Give the dataset a multiple of that many rows, or "
        'set uneven_rows="drop", "pad", or "keep" for a function that takes uneven parts'
    )


def split_by_group(
    name: str, table: pa.Table, column: str, world_size: int
) -> tuple[pa.Table, RowRanges]:
    """Give a table's rows with those of a group side by side, and each rank's of them."""
    _check_column(name, column, table.column_names)
    starts, contiguous = find_group_starts([table[column].to_numpy()])
    if not contiguous:
        table = table.sort_by(column)
        starts, _ = find_group_starts([table[column].to_numpy()])
    cuts = [0, *compute_split_indices(table.num_rows, world_size, starts), table.num_rows]
    return table, tuple(itertools.pairwise(cuts))


def _check_column(name: str, column: str, names: Sequence[str]) -> None:
    if column not in names:
        raise ValueError(
            f"DataConfig.group_column is {column!r}, but datasets[{name!r}] has "
            f"the columns {', '.join(map(repr, names)) or 'none'}"
        )


def compute_split_indices(
    rows: int, world_size: int, starts: NDArray[np.int64] | None = None
) -> list[int]:
    """Say at which row numbers to cut so that the parts are as equal as can be.

    Args:
        rows: Number of rows.
        world_size: Number of parts.
        starts: The only row numbers where a cut may be, ascending from 0, if not everywhere.
    """
    even = [rows * part // world_size for part in range(1, world_size)]
    if starts is None:
        return even
    import numpy as np

    allowed = np.append(starts, rows)
    return [int(allowed[np.abs(allowed - cut).argmin()]) for cut in even]


def _iter_column(dataset: Dataset, column: str) -> Iterator[NDArray[Any]]:
    """Give a column of a dataset, piece by piece."""
    only = dataset.select_columns([column])
    for batch in only.iter_batches(batch_size=None, batch_format="numpy"):
        yield batch[column]


def find_group_starts(batches: Iterable[NDArray[Any]]) -> tuple[NDArray[np.int64], bool]:
    """Find where each run of equal values begins, and whether no value has two runs."""
    import numpy as np

    starts: list[NDArray[np.int64]] = []
    values: list[NDArray[np.generic]] = []
    rows = 0
    for here in batches:
        if not len(here):
            continue
        new = np.flatnonzero(np.append(True, here[1:] != here[:-1]))
        if values and here[0] == values[-1][-1]:
            new = new[1:]
        starts.append(new + rows)
        if len(new):
            values.append(here[new])
        rows += len(here)
    if not values:
        return np.empty(0, dtype=np.int64), True
    firsts = np.concatenate(values)
    return np.concatenate(starts), len(np.unique(firsts)) == len(firsts)
