"""Split materialized datasets by row number, without dropping rows.

A streamed split gives the same number of rows to readers that all read at the same time. If no row
may be dropped, if rows belong together, or if one worker reads its shard again while the others
continue, a dataset is materialized once and split by row number instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from drawbar.train._config.data_config import DataConfig
from drawbar.train._data.local_shuffle import shuffled_rows, take_rows
from drawbar.train._data.shuffling import shuffle_dataset
from drawbar.train._ray_compat import count_block_rows
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
    """One rank's rows of a materialized dataset: its `ray.data.DataIterator` and its blocks.

    All attributes except `iter_arrow_tables` and `is_in_object_store` belong to the iterator.
    """

    def __init__(self, part: Dataset) -> None:
        import ray

        self._block_refs = _get_arrow_blocks(part)
        self._iterator_ref = ray.put(part.iterator())

    @cached_property
    def _iterator(self) -> Any:  # a DataIterator; Ray's own annotation forbids batch_size=None
        """The iterator. Workers that do not use it need not import Ray Data."""
        import ray

        return ray.get(self._iterator_ref)

    @property
    def is_in_object_store(self) -> bool:
        """True if the tables of `iter_arrow_tables` are stored in Ray's object store."""
        return self._block_refs is not None

    def iter_arrow_tables(self) -> Iterator[pa.Table]:
        """Iterate over the rows of a new epoch as Arrow tables.

        Arrow blocks are read directly from the object store, without a copy and without Ray Data,
        whose import and execution would take a worker one or two seconds.
        """
        import ray

        if self._block_refs is None:
            yield from self._iterator.iter_batches(batch_size=None, batch_format="pyarrow")
            return
        for number, block in enumerate(self._block_refs):
            ahead = self._block_refs[number + 1 : number + 2]
            if ahead:
                ray.wait(ahead, timeout=0)  # prefetch while this block is used
            yield ray.get(block)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not set yet while this object is unpickled
            raise AttributeError(name)
        return getattr(self._iterator, name)


class SlicedShard(MaterializedShard):
    """One rank's rows of blocks that are shared with other ranks.

    The tables are views of the blocks. The iterator, if a worker uses it, puts the rows into the
    object store again, which needs no task and no CPU.

    Args:
        slices: Blocks and row ranges: (block, first row, one after the last row).
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
        """True if the tables of `iter_arrow_tables` are stored in Ray's object store."""
        return True

    def iter_arrow_tables(self) -> Iterator[pa.Table]:
        """Iterate over the rows of a new epoch as Arrow tables."""
        import ray

        for block, low, high in self._slices:
            yield ray.get(block).slice(low, high - low)


def _get_arrow_blocks(part: Dataset) -> list[ray.ObjectRef[pa.Table]] | None:
    """Return the blocks of a materialized dataset, None if they are not Arrow tables."""
    import pyarrow as pa

    schema = part.schema()
    is_arrow = schema is not None and isinstance(schema.base_schema, pa.Schema)
    return part.to_arrow_refs() if is_arrow else None


class MaterializedSplits:
    """Datasets of a run that are split by row number. Each is materialized on first use."""

    def __init__(self) -> None:
        self._datasets: dict[str, Dataset] = {}
        self._group_starts: dict[str, NDArray[np.int64]] = {}
        self._blocks: dict[str, tuple[list[ray.ObjectRef[pa.Table]], list[int]]] = {}
        self._shards: dict[tuple[str, int], list[MaterializedShard]] = {}

    def get_shards(
        self, name: str, dataset: Dataset, config: DataConfig, world_size: int
    ) -> list[MaterializedShard]:
        """Return each rank's shard of a dataset.

        Materializing needs CPUs, so this is called for all possible world sizes before the workers
        reserve them. Later calls return the same shards.

        Args:
            name: Name of the dataset.
            dataset: Dataset to materialize, unless it already has been.
            config: How to split the dataset.
            world_size: Number of shards.

        Raises:
            ValueError: The dataset has no column `group_column`, no rows, or rows that
                `uneven_rows="error"` does not allow.
        """
        if name not in self._datasets:
            self._materialize(name, dataset, config)
        if (name, world_size) not in self._shards:
            whole_dataset = self._datasets[name]
            num_rows = whole_dataset.count()
            check_has_rows(name, num_rows, 1)
            check_even_rows(name, num_rows, world_size, config.uneven_rows)
            if config.uneven_rows == "pad":
                windows = split_rows(num_rows, world_size, "pad")
                self._shards[name, world_size] = [
                    self._slice_blocks(name, [range(low, high)]) for low, high in windows
                ]
                return self._shards[name, world_size]
            cuts = compute_split_indices(num_rows, world_size, self._group_starts.get(name))
            parts = whole_dataset.split_at_indices(cuts) if cuts else [whole_dataset]
            for part in parts:  # Readers of a materialized part would show a progress bar.
                part.context.enable_progress_bars = False
            self._shards[name, world_size] = [MaterializedShard(part) for part in parts]
        return self._shards[name, world_size]

    def count(self, name: str) -> int:
        """Return the number of rows of a materialized dataset."""
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
            self._slice_blocks(name, segments)
            for segments in rows.split_unread(position.rows_read, world_size)
        ]

    def _slice_blocks(self, name: str, segments: Sequence[Segment]) -> MaterializedShard:
        """Return rows of a dataset as a shard. Shuffled rows are copied into the object store."""
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
        materialized = dataset.materialize()
        # Row numbers are only known in Arrow blocks. pandas blocks become Arrow blocks.
        if group_column is None and _get_arrow_blocks(materialized) is None:
            as_arrow = materialized.map_batches(_return_unchanged, batch_format="pyarrow")
            materialized = as_arrow.materialize()
        if group_column is not None:
            _check_column(name, group_column, materialized.columns() or [])
            starts, contiguous = find_group_starts(_iter_column(materialized, group_column))
            if not contiguous:
                materialized = materialized.sort(group_column).materialize()
                starts, _ = find_group_starts(_iter_column(materialized, group_column))
            self._group_starts[name] = starts
        self._datasets[name] = materialized
        blocks = _get_arrow_blocks(materialized)
        if blocks:
            self._blocks[name] = blocks, count_block_rows(materialized)


def _return_unchanged(table: pa.Table) -> pa.Table:
    return table


def check_has_rows(name: str, rows: int, num_workers: int) -> None:
    """Check that every worker gets a row of a dataset.

    Args:
        name: Name of the dataset.
        rows: Number of its rows.
        num_workers: Number of workers that need at least one row.

    Raises:
        ValueError: The dataset has fewer rows than that, or none.
    """
    if not rows:
        raise ValueError(f"datasets[{name!r}] has no rows")
    if rows < num_workers:
        raise ValueError(
            f"datasets[{name!r}] has {rows} row{'s' * (rows > 1)}, but each of {num_workers} "
            "workers needs at least one. Start fewer workers, or set DataConfig.uneven_rows to "
            '"pad" or "keep"'
        )


def check_even_rows(name: str, rows: int, world_size: int, uneven_rows: UnevenRows) -> None:
    """Check that rows can be divided evenly if `uneven_rows` is "error".

    Raises:
        ValueError: They cannot. The message lists the rows of each rank.
    """
    if uneven_rows != "error" or not rows % world_size:
        return
    counts = [high - low for low, high in split_rows(rows, world_size, "keep")]
    most = max(counts)
    groups = [
        f"{count} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        for count in (most, most - 1)
        if (ranks := [rank for rank, rank_rows in enumerate(counts) if rank_rows == count])
    ]
    raise ValueError(
        f"datasets[{name!r}] has {rows} rows, which cannot be divided evenly between {world_size} "
        f"workers: {', '.join(groups)}. DataConfig.uneven_rows='error' forbids this. Change the "
        f'number of rows to a multiple of {world_size}, or set uneven_rows to "drop" or "pad". '
        'If the training function supports uneven shards, set uneven_rows="keep"'
    )


def split_by_group(
    name: str, table: pa.Table, column: str, world_size: int
) -> tuple[pa.Table, RowRanges]:
    """Return a table with consecutive groups, and the row range of each rank."""
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
    """Return the row numbers at which to split a dataset into parts of nearly equal length.

    Args:
        rows: Number of rows.
        world_size: Number of parts.
        starts: Row numbers at which a split is allowed, ascending from 0. Default: everywhere.
    """
    even = [rows * part // world_size for part in range(1, world_size)]
    if starts is None:
        return even
    import numpy as np

    allowed = np.append(starts, rows)
    return [int(allowed[np.abs(allowed - cut).argmin()]) for cut in even]


def _iter_column(dataset: Dataset, column: str) -> Iterator[NDArray[Any]]:
    """Yield a column of a dataset in batches."""
    column_dataset = dataset.select_columns([column])
    for batch in column_dataset.iter_batches(batch_size=None, batch_format="numpy"):
        yield batch[column]


def find_group_starts(batches: Iterable[NDArray[Any]]) -> tuple[NDArray[np.int64], bool]:
    """Return where runs of equal values start, and whether each value has only one run."""
    import numpy as np

    starts: list[NDArray[np.int64]] = []
    values: list[NDArray[np.generic]] = []
    rows = 0
    for batch in batches:
        if not len(batch):
            continue
        new = np.flatnonzero(np.append(True, batch[1:] != batch[:-1]))
        if values and batch[0] == values[-1][-1]:
            new = new[1:]
        starts.append(new + rows)
        if len(new):
            values.append(batch[new])
        rows += len(batch)
    if not values:
        return np.empty(0, dtype=np.int64), True
    firsts = np.concatenate(values)
    return np.concatenate(starts), len(np.unique(firsts)) == len(firsts)
