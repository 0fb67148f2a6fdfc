"""Tables in memory, and Parquet files that fit into it: split by row numbers, without tasks.

What a rank gets of a table lies in Ray's object store, once per node, as one block. Ray Data's
iterators read it as they read anything else, but start no task and no actor for that, so a table
needs no CPU beside the workers, and a restart inside an epoch reads nothing again.
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
"""How much of a node's object store Parquet files may fill; larger ones are streamed."""


def is_table(given: object) -> bool:
    """Whether something is a table: of Arrow, pandas, polars ..., or a Hugging Face dataset."""
    return hasattr(given, "__arrow_c_stream__") or _is_hugging_face_dataset(given)


def is_path_or_paths(given: object) -> bool:
    """Whether something is a path, or a list of paths."""
    if isinstance(given, list | tuple):
        return bool(given) and all(isinstance(each, str | os.PathLike) for each in given)
    return isinstance(given, str | os.PathLike)


def _is_hugging_face_dataset(given: object) -> bool:
    return all(hasattr(given, each) for each in ("with_format", "features", "__len__"))


def to_arrow_table(given: Any) -> pa.Table:
    """Give the Arrow table that a table is, without its index if it has one."""
    import pyarrow as pa

    if isinstance(given, pa.Table):
        return given
    if _is_hugging_face_dataset(given):
        return given.with_format("arrow")[:]
    if hasattr(given, "iloc"):
        return pa.Table.from_pandas(given, preserve_index=False)
    return pa.table(given)


def read_parquet(given: Any) -> pa.Table | Dataset:
    """Read Parquet files, or have Ray Data stream them if they are too large for that.

    Raises:
        FileNotFoundError: There are none.
    """
    import pyarrow.dataset
    import ray
    import ray.data

    paths = [os.fspath(each) for each in given] if isinstance(given, list | tuple) else given
    paths = os.fspath(paths) if isinstance(paths, os.PathLike) else paths
    files = pyarrow.dataset.dataset(paths, format="parquet")
    if not files.files:
        raise FileNotFoundError(f"there is no Parquet file in {paths}")
    groups = (group for each in files.get_fragments() for group in each.row_groups)
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
    of = world_size if config.is_split(name) else 1
    if config.shuffles(name):
        table = shuffle_table(table)
    grouped = None
    # Also for one worker: the training function may need the rows of a group side by side.
    if config.is_split(name) and config.group_column is not None:
        table, grouped = split_by_group(name, table, config.group_column, of)
        position = position.rewind_epoch()  # a split inside an epoch would separate groups
    bounds = grouped or split_rows(table.num_rows, of, config.uneven_rows)
    parts = [_put_tables([table.slice(low, high - low)]) for low, high in bounds]
    first = (
        _make_unread_table_shards(table, of, config.uneven_rows, position)
        if position.rows_read
        else []
    )
    return [
        DatasetShard(
            parts[number],
            ShardSpec(
                dataset=name,
                shard_index=number,
                num_shards=of,
                num_rows=bounds[number][1] - bounds[number][0],
                # Groups may have been sorted: row numbers of the user's table are unknown.
                total_rows=None if grouped else table.num_rows,
                uneven_rows=config.uneven_rows,
            ),
            position=position,
            unread_source=first[number] if first else None,
        )
        for number in (range(of) if of == world_size else [0] * world_size)
    ]


def _put_tables(pieces: list[pa.Table]) -> MaterializedShard:
    """Put tables into the object store as the rows of a rank."""
    import ray.data

    part = ray.data.from_blocks(pieces)
    part.context.execution_options.preserve_order = True
    part.context.enable_progress_bars = False
    return MaterializedShard(part)


def _make_unread_table_shards(
    table: pa.Table, of: int, uneven_rows: UnevenRows, position: RowPosition
) -> list[MaterializedShard]:
    """Put each rank's unread rows of the epoch that the position is in into the object store."""
    if any(each.shuffle for each in position.rows_read):
        table = table.combine_chunks()  # else each `take` copies all chunks
    order = partial(shuffled_rows, epoch=position.epoch)
    rest = NumberedRows([table.num_rows], uneven_rows, order).split_unread(position.rows_read, of)
    return [
        _put_tables([_slice_tables(table, segment) for segment in segments] or [table.slice(0, 0)])
        for segments in rest
    ]


def _slice_tables(table: pa.Table, segment: Segment) -> pa.Table:
    if isinstance(segment, range):
        return table.slice(segment.start, len(segment))
    return table.take(segment)
