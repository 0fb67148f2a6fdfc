"""Split datasets between ranks by row number, without dropping rows.

`IndexedDataset` is implemented for tables in memory, materialized Ray Data datasets, and map-style
datasets. A streamed split gives the same number of rows to readers that all read at the same time.
If no row may be dropped, if rows belong together, or if one worker reads its shard again while the
others continue, a dataset of Ray Data is materialized once and split by row number.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from drawbar._base.ray_compat import count_block_rows
from drawbar._data import row_sources
from drawbar._data.data_config import DataConfig
from drawbar._data.dictionaries import list_small_dictionaries, widen_dictionaries
from drawbar._data.groups import (
    check_group_column,
    find_group_starts,
    iter_column,
    sort_dataset,
    sort_table,
)
from drawbar._data.row_positions import (
    LocalShuffle,
    NumberedRows,
    RowPosition,
    RowRanges,
    Segment,
    split_rows,
)
from drawbar._data.shard import DatasetShard, ShardSpec
from drawbar._records.events import UnevenRows

if TYPE_CHECKING:
    import pyarrow as pa
    import ray
    from ray.data import Dataset

    from drawbar._data.row_positions import Numbers

SHUFFLE_SEED = 0
"""Seed of `DataConfig.datasets_to_shuffle`: all attempts split the rows in the same way, also those
in a new driver."""


class IndexedDataset(ABC):
    """A dataset that is split between ranks by row number.

    Args:
        block_rows: Number of rows of each block; empty if unknown.
        group_starts: Row numbers at which it may be split. Default: everywhere.
    """

    def __init__(self, block_rows: Sequence[int], group_starts: Numbers | None = None) -> None:
        self._block_rows = block_rows
        self._group_starts = group_starts

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return sum(self._block_rows)

    @property
    def is_grouped(self) -> bool:
        """True if rows are kept together in groups."""
        return self._group_starts is not None

    @abstractmethod
    def make_source(self, segments: Sequence[Segment]) -> Any:
        """Return a source of some rows, in this order."""

    def shuffle(
        self, segments: list[Segment], shuffle: LocalShuffle, rank: int, *, epoch: int
    ) -> Numbers:
        """Return the row numbers of a rank's segments in the order of a local shuffle."""
        return row_sources.shuffled_rows(segments, shuffle, rank, epoch=epoch)

    def split(self, num_shards: int, uneven_rows: UnevenRows) -> RowRanges:
        """Return the consecutive rows of each shard."""
        if self._group_starts is None:
            return split_rows(self.num_rows, num_shards, uneven_rows)
        cuts = compute_split_indices(self.num_rows, num_shards, self._group_starts)
        return tuple(itertools.pairwise([0, *cuts, self.num_rows]))

    def make_sources(self, num_shards: int, uneven_rows: UnevenRows) -> list[Any]:
        """Return the source of each shard."""
        windows = self.split(num_shards, uneven_rows)
        return [self.make_source([range(low, high)]) for low, high in windows]

    def make_unread_sources(
        self, position: RowPosition, num_shards: int, uneven_rows: UnevenRows
    ) -> list[Any] | None:
        """Return sources of each shard's unread rows in the epoch of a position.

        None if the position is at the beginning of an epoch, or if the epoch has to restart there:
        a new split would separate groups, or the row numbers are unknown.
        """
        if not position.rows_read or self.is_grouped or not self._block_rows:
            return None
        order = partial(self.shuffle, epoch=position.epoch)
        rows = NumberedRows(self._block_rows, uneven_rows, order)
        return [
            self.make_source(segments)
            for segments in rows.split_unread(position.rows_read, num_shards)
        ]


class IndexedTable(IndexedDataset):
    """A table in memory. The rows of a rank are put into the object store, once per node."""

    def __init__(self, table: pa.Table, group_starts: Numbers | None = None) -> None:
        super().__init__([table.num_rows], group_starts)
        self._table = table

    @classmethod
    def open(cls, name: str, table: pa.Table, config: DataConfig) -> IndexedTable:
        """Shuffle a table or sort its groups, if the config requires it."""
        if config.shuffles(name):
            # Chunks of a column may have different dictionaries, which take() does not combine.
            table = table.unify_dictionaries().take(_shuffle_numbers(table.num_rows))
        column = config.group_column
        # Also for a single worker: the training function may need consecutive rows for each group.
        if column is None or not config.is_split(name):
            return cls(table)
        check_group_column(name, column, table.schema)
        starts, contiguous = find_group_starts([table[column]])
        if not contiguous:
            table = sort_table(table, column)
            starts, _ = find_group_starts([table[column]])
        return cls(table, starts)

    @cached_property
    def _single_chunk(self) -> pa.Table:
        """The table in one chunk: each take() of several chunks would copy all of them."""
        return self._table.combine_chunks()

    def make_source(self, segments: Sequence[Segment]) -> row_sources.MaterializedShard:
        """Put some rows into the object store."""
        parts = [
            self._table.slice(segment.start, len(segment))
            if isinstance(segment, range)
            else self._single_chunk.take(segment)
            for segment in segments
        ]
        dataset = row_sources.make_dataset(parts or [self._table.slice(0, 0)])
        return row_sources.MaterializedShard(dataset)


class IndexedBlocks(IndexedDataset):
    """A materialized dataset of Ray Data, whose blocks are stored in the object store."""

    def __init__(self, dataset: Dataset, group_starts: Numbers | None = None) -> None:
        self._dataset = dataset
        self._blocks = row_sources.get_arrow_blocks(dataset)
        super().__init__(count_block_rows(dataset) if self._blocks else (), group_starts)
        self._sources: dict[int, list[Any]] = {}

    @classmethod
    def materialize(cls, name: str, dataset: Dataset, config: DataConfig) -> IndexedBlocks:
        """Compute a dataset. Shuffle it or sort its groups, if the config requires it."""
        dataset = config.apply_options(name, dataset)
        if config.shuffles(name):
            dataset = _to_arrow(dataset).random_shuffle(seed=SHUFFLE_SEED)
        materialized = dataset.materialize()
        column = config.group_column
        if column is None:
            return cls(
                _to_arrow(materialized).materialize()
                if _must_convert(materialized)
                else materialized
            )
        check_group_column(name, column, materialized.schema())
        starts, contiguous = find_group_starts(iter_column(materialized, column))
        if not contiguous:
            materialized = sort_dataset(materialized, column)
            starts, _ = find_group_starts(iter_column(materialized, column))
        return cls(materialized, starts)

    @property
    def num_rows(self) -> int:
        """Number of rows, also if the blocks are not Arrow tables."""
        rows: int = self._dataset.count()
        return rows

    def make_sources(self, num_shards: int, uneven_rows: UnevenRows) -> list[Any]:
        """Return the source of each shard. Later calls return the same sources.

        Rows are split for all possible world sizes before workers start, because that needs CPUs.
        """
        if num_shards not in self._sources:
            if uneven_rows == "pad":
                self._sources[num_shards] = super().make_sources(num_shards, uneven_rows)
            else:
                cuts = [low for low, _ in self.split(num_shards, uneven_rows)[1:]]
                parts = self._dataset.split_at_indices(cuts) if cuts else [self._dataset]
                for part in parts:  # Readers of a materialized part would show a progress bar.
                    part.context.enable_progress_bars = False
                self._sources[num_shards] = [row_sources.MaterializedShard(p) for p in parts]
        return self._sources[num_shards]

    def make_source(self, segments: Sequence[Segment]) -> row_sources.SlicedShard:
        """Return views of blocks. Shuffled rows are copied into the object store."""
        import ray

        assert self._blocks
        slices: list[tuple[ray.ObjectRef[pa.Table], int, int]] = []
        for segment in segments:
            if isinstance(segment, range):
                slices += self._find_slices(segment)
            else:
                table = row_sources.take_rows(self._blocks, self._block_rows, segment)
                slices.append((ray.put(table), 0, table.num_rows))
        return row_sources.SlicedShard(slices or [(self._blocks[0], 0, 0)])

    def _find_slices(self, rows: range) -> list[tuple[ray.ObjectRef[pa.Table], int, int]]:
        """Return where a range of rows is stored: (block, first row, one after the last)."""
        ends = itertools.accumulate(self._block_rows)
        return [
            (block, max(rows.start - end + count, 0), min(rows.stop - end + count, count))
            for block, count, end in zip(self._blocks or (), self._block_rows, ends, strict=True)
            if end - count < rows.stop and rows.start < end
        ]


class IndexedItems(IndexedDataset):
    """A PyTorch map-style dataset, which is put into the object store once per node."""

    def __init__(self, name: str, dataset: row_sources.MapStyleDataset, config: DataConfig) -> None:
        import numpy as np
        import ray

        if config.is_split(name) and config.group_column is not None:
            raise ValueError(
                f"DataConfig.group_column={config.group_column!r} needs a dataset with columns, "
                f"but datasets[{name!r}] is a PyTorch dataset ({type(dataset).__name__}), which "
                "has none"
            )
        num_items = len(dataset)
        super().__init__([num_items])
        self._dataset_or_ref = ray.put(dataset) if ray.is_initialized() else dataset
        self._items = _shuffle_numbers(num_items) if config.shuffles(name) else np.arange(num_items)

    def make_source(self, segments: Sequence[Segment]) -> row_sources.MapStyleShard:
        """Return a source of some items, in this order."""
        items = self._items[_concat_numbers(segments)]
        return row_sources.MapStyleShard(self._dataset_or_ref, items)

    def shuffle(
        self, segments: list[Segment], shuffle: LocalShuffle, rank: int, *, epoch: int
    ) -> Numbers:
        """Return the numbers of a rank's items in the order of `MapStyleShard`'s shuffle."""
        numbers = _concat_numbers(segments)
        return row_sources.permute(numbers, shuffle.compute_seed(epoch, rank))


def _concat_numbers(segments: Sequence[Segment]) -> Numbers:
    import numpy as np

    return np.concatenate([np.empty(0, dtype=np.int64), *segments])


def _shuffle_numbers(count: int) -> Numbers:
    import numpy as np

    return np.random.default_rng(SHUFFLE_SEED).permutation(count)


def _to_arrow(dataset: Dataset) -> Dataset:
    """Convert the blocks of a dataset to Arrow tables whose dictionaries can be combined."""
    arrow: Dataset = dataset.map_batches(
        widen_dictionaries, batch_format="pyarrow", batch_size=None
    )
    return arrow


def _must_convert(materialized: Dataset) -> bool:
    """Return whether the row numbers are unknown, or dictionaries cannot be combined."""
    if row_sources.get_arrow_blocks(materialized) is None:
        return True  # Row numbers are only known in Arrow blocks.
    schema = materialized.schema()
    is_single = materialized.num_blocks() == 1
    return (
        not is_single and schema is not None and bool(list_small_dictionaries(schema.base_schema))
    )


def shard_by_row_number(
    name: str, dataset: IndexedDataset, config: DataConfig, world_size: int, position: RowPosition
) -> list[DatasetShard]:
    """Return the shard of a dataset for each rank: consecutive rows, or all if it is not split.

    Raises:
        ValueError: The dataset has no rows, or rows that `uneven_rows="error"` does not allow.
    """
    num_shards = world_size if config.is_split(name) else 1
    check_has_rows(name, dataset.num_rows, 1)
    check_even_rows(name, dataset.num_rows, num_shards, config.uneven_rows)
    windows = dataset.split(num_shards, config.uneven_rows)
    sources = dataset.make_sources(num_shards, config.uneven_rows)
    unread = dataset.make_unread_sources(position, num_shards, config.uneven_rows)
    return [
        DatasetShard(
            sources[number],
            ShardSpec(
                dataset=name,
                shard_index=number,
                num_shards=num_shards,
                num_rows=windows[number][1] - windows[number][0],
                # Groups may have been sorted: row numbers of the user's dataset are unknown.
                total_rows=None if dataset.is_grouped else dataset.num_rows,
                uneven_rows=config.uneven_rows,
            ),
            position=position if unread else position.rewind_epoch(),
            unread_source=unread[number] if unread else None,
        )
        for number in (range(num_shards) if num_shards == world_size else [0] * world_size)
    ]


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


def compute_split_indices(rows: int, world_size: int, starts: Numbers | None = None) -> list[int]:
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
