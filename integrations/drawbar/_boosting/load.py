"""Load this worker's shards and agree on one schema with all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drawbar._boosting.block import BlockStore
from drawbar._boosting.columns import ColumnRoles
from drawbar._boosting.reader import ColumnFormat, ShardSummary, read_blocks
from drawbar._boosting.schema import build_schema
from drawbar._boosting.shard import Shard
from drawbar.train import collective, get_context, get_dataset_shard


def load_shards(
    datasets: Sequence[str],
    columns: ColumnRoles,
    reading: ColumnFormat | None = None,
    *,
    get_shard: Callable[[str], Any] = get_dataset_shard,
    folder: Path | None = None,
    should_cache: bool = False,
) -> dict[str, Shard]:
    """Read this worker's part of each dataset and agree on a schema with all ranks.

    Collective: call it on all ranks, in the training function. Each part is read once.

    Args:
        datasets: Names of the datasets, with the training dataset first.
        columns: Roles of the columns.
        reading: Column formats that the library accepts. Default: float32 for all columns.
        get_shard: Returns this rank's part of a dataset by name. Default: the trainer's datasets.
        folder: Directory for the files with the rows. Default: the system's temporary directory.
        should_cache: Whether to keep the rows while this process lives, so that a worker that
            survives the failure of another one does not read them again.

    Returns:
        Shards by name of the dataset.

    Raises:
        ValueError: The data is invalid. Every rank raises the same error.
    """
    context = get_context()
    rank = context.get_world_rank()
    key = ("drawbar._boosting", context.get_run_id(), context.get_world_size(), rank)
    loaded = context.cache.get(key)
    if loaded is None:
        stores = {name: BlockStore(folder) for name in datasets}
        local_summaries = {
            name: read_blocks(name, get_shard(name), columns, stores[name], reading)
            for name in datasets
        }
        loaded = stores, local_summaries
    if should_cache:
        context.cache[key] = loaded
    stores, local_summaries = loaded
    gathered: list[dict[str, ShardSummary]] = collective.all_gather(local_summaries)
    summaries = {name: [by_name[name] for by_name in gathered] for name in datasets}
    schema = build_schema(summaries, columns, reading or ColumnFormat())
    return {
        name: Shard(name, stores[name], summaries[name], rank, schema, columns) for name in datasets
    }
