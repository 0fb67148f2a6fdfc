"""Shard in-memory tables and small Parquet files by row number.

The rows of a rank are stored as one block in Ray's object store, once per node. Ray Data's
iterators read this block without starting a task or an actor. Tables therefore need no CPUs in
addition to the workers' CPUs, and a restart within an epoch reads no row again.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from drawbar.train._config.data_config import DataConfig
from drawbar.train._data.local_shuffle import shuffled_rows
from drawbar.train._data.materialized_split import MaterializedShard, split_by_group
from drawbar.train._data.shard import DatasetShard, ShardSpec
from drawbar.train._data.shuffling import shuffle_table
from drawbar.train._row_positions import NumberedRows, RowPosition, Segment, UnevenRows, split_rows

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset

MAX_OBJECT_STORE_FRACTION = 0.25
"""Fraction of a node's object store that Parquet files may fill; larger ones are streamed."""


def is_table(value: object) -> bool:
    """Return whether a value is a table (Arrow, pandas, polars ...) or a Hugging Face dataset."""
    return hasattr(value, "__arrow_c_stream__") or _is_hugging_face_dataset(value)


def is_path_or_paths(value: object) -> bool:
    """Return whether a value is a path or a list of paths."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(path, str | os.PathLike) for path in value)
    return isinstance(value, str | os.PathLike)


def _is_hugging_face_dataset(value: object) -> bool:
    return all(hasattr(value, name) for name in ("with_format", "features", "__len__"))


def to_arrow_table(table: Any) -> pa.Table:
    """Convert a table to an Arrow table, without its index."""
    import pyarrow as pa

    if isinstance(table, pa.Table):
        return table
    if _is_hugging_face_dataset(table):
        return table.with_format("arrow")[:]
    if hasattr(table, "iloc"):
        return pa.Table.from_pandas(table, preserve_index=False)
    return pa.table(table)


def read_parquet(path_or_paths: Any) -> pa.Table | Dataset:
    """Read Parquet files, or return a streamed Ray Data dataset if they are too large.

    Raises:
        FileNotFoundError: There are no Parquet files in the paths.
    """
    import pyarrow.dataset
    import ray
    import ray.data

    is_list = isinstance(path_or_paths, list | tuple)
    paths = [os.fspath(path) for path in path_or_paths] if is_list else path_or_paths
    paths = os.fspath(paths) if isinstance(paths, os.PathLike) else paths
    files = pyarrow.dataset.dataset(paths, format="parquet")
    if not files.files:
        raise FileNotFoundError(f"there is no Parquet file in {paths}")
    groups = (group for fragment in files.get_fragments() for group in fragment.row_groups)
    nbytes = sum(group.total_byte_size for group in groups)
    stores = [node["Resources"].get("object_store_memory", 0) for node in _list_alive_nodes()]
    if nbytes <= MAX_OBJECT_STORE_FRACTION * min(stores, default=0):
        return files.to_table()
    streamed: Dataset = ray.data.read_parquet(paths)
    return streamed


def _list_alive_nodes() -> list[dict[str, dict[str, float]]]:
    import ray

    if not ray.is_initialized():
        ray.init()
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]  # Ray has no types here


def shard_table(
    name: str, table: pa.Table, config: DataConfig, world_size: int, position: RowPosition
) -> list[DatasetShard]:
    """Return the shard of a table for each rank: consecutive rows, or all rows if it is not split.

    Raises:
        ValueError: There is no column `DataConfig.group_column`.
    """
    num_shards = world_size if config.is_split(name) else 1
    if config.shuffles(name):
        table = shuffle_table(table)
    grouped = None
    # Also for a single worker: the training function may need consecutive rows for each group.
    if config.is_split(name) and config.group_column is not None:
        table, grouped = split_by_group(name, table, config.group_column, num_shards)
        position = position.rewind_epoch()  # A split within an epoch would separate groups.
    bounds = grouped or split_rows(table.num_rows, num_shards, config.uneven_rows)
    parts = [_put_tables([table.slice(low, high - low)]) for low, high in bounds]
    first = (
        _make_unread_table_shards(table, num_shards, config.uneven_rows, position)
        if position.rows_read
        else []
    )
    return [
        DatasetShard(
            parts[number],
            ShardSpec(
                dataset=name,
                shard_index=number,
                num_shards=num_shards,
                num_rows=bounds[number][1] - bounds[number][0],
                # Groups may have been sorted: row numbers of the user's table are unknown.
                total_rows=None if grouped else table.num_rows,
                uneven_rows=config.uneven_rows,
            ),
            position=position,
            unread_source=first[number] if first else None,
        )
        for number in (range(num_shards) if num_shards == world_size else [0] * world_size)
    ]


def _put_tables(tables: list[pa.Table]) -> MaterializedShard:
    """Put the rows of a rank into the object store."""
    import ray.data

    part = ray.data.from_blocks(tables)
    part.context.execution_options.preserve_order = True
    part.context.enable_progress_bars = False
    return MaterializedShard(part)


def _make_unread_table_shards(
    table: pa.Table, num_shards: int, uneven_rows: UnevenRows, position: RowPosition
) -> list[MaterializedShard]:
    """Put each rank's unread rows of the epoch that the position is in into the object store."""
    if any(reads.shuffle for reads in position.rows_read):
        table = table.combine_chunks()  # Otherwise, each take() copies all chunks.
    order = partial(shuffled_rows, epoch=position.epoch)
    rows = NumberedRows([table.num_rows], uneven_rows, order)
    return [
        _put_tables([_slice_tables(table, segment) for segment in segments] or [table.slice(0, 0)])
        for segments in rows.split_unread(position.rows_read, num_shards)
    ]


def _slice_tables(table: pa.Table, segment: Segment) -> pa.Table:
    if isinstance(segment, range):
        return table.slice(segment.start, len(segment))
    return table.take(segment)
