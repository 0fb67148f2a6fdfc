"""From the run's datasets to shards that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from drawbar._boosting._block import BlockStore, DiskBlockStore, MemoryBlockStore
from drawbar._boosting._columns import ColumnRoles
from drawbar._boosting._reader import ColumnFormat, ShardSummary, read_blocks
from drawbar._boosting._schema import build_schema
from drawbar._boosting._shard import Shard
from drawbar.train import collective, get_context, get_dataset_shard

TableSource = Callable[[str], Iterable[object]]
"""Gives this rank's Arrow tables of a dataset, by the dataset's name."""


def load_shards(
    datasets: Sequence[str],
    columns: ColumnRoles,
    reading: ColumnFormat | None = None,
    *,
    source: TableSource | None = None,
    on_disk: bool = False,
    folder: Path | None = None,
    should_cache: bool = False,
) -> dict[str, Shard]:
    """Read this worker's part of each dataset, and agree with all ranks on what it means.

    A collective: every rank calls it, inside the training function. Each part is read once.

    Args:
        datasets: Names of the datasets, the training one first.
        columns: Which column plays which role.
        reading: How the library takes columns. Default: all as float32.
        source: Where the tables come from. Default: the trainer's datasets.
        on_disk: Keep the rows in files rather than in memory.
        folder: Where these files are made. Default: the system's folder for such.
        keep: Keep the rows as long as this process lives, so that a worker that survives another's
            failure need not read them again.

    Raises:
        ValueError: The data cannot be used; every rank gets the same error.
    """
    context = get_context()
    rank = context.get_world_rank()
    key = ("drawbar._boosting", context.get_run_id(), context.get_world_size(), rank)
    loaded = context.cache.get(key)
    if loaded is None:
        stores = {
            name: DiskBlockStore(folder) if on_disk else MemoryBlockStore() for name in datasets
        }
        local_summaries = {
            name: _read(name, source, columns, stores[name], reading) for name in datasets
        }
        loaded = stores, local_summaries
    if should_cache:
        context.cache[key] = loaded
    stores, local_summaries = loaded
    gathered: list[dict[str, ShardSummary]] = collective.all_gather(local_summaries)
    summaries = {name: [each[name] for each in gathered] for name in datasets}
    schema = build_schema(summaries)
    return {
        name: Shard(name, stores[name], summaries[name], rank, schema, columns) for name in datasets
    }


def _read(
    name: str,
    source: TableSource | None,
    columns: ColumnRoles,
    store: BlockStore,
    reading: ColumnFormat | None,
) -> ShardSummary:
    if source is not None:
        return read_blocks(name, source(name), columns, store, reading)
    shard: Any = get_dataset_shard(name)  # its annotation is that of Ray Data's iterator
    tables = shard.iter_arrow_tables()
    return read_blocks(
        name, tables, columns, store, reading, in_object_store=shard.is_in_object_store
    )
