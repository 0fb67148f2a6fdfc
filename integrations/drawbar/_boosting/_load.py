"""From the run's datasets to shards that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from drawbar._boosting._block import Disk, Memory, Store
from drawbar._boosting._columns import Columns
from drawbar._boosting._read import Reading, Summary, read
from drawbar._boosting._schema import agree
from drawbar._boosting._shard import Shard
from drawbar.train import collective, get_context, get_dataset_shard

Source = Callable[[str], Iterable[object]]
"""Gives this rank's Arrow tables of a dataset, by the dataset's name."""


def load(
    datasets: Sequence[str],
    columns: Columns,
    reading: Reading | None = None,
    *,
    source: Source | None = None,
    on_disk: bool = False,
    folder: Path | None = None,
    keep: bool = False,
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
        stores = {name: Disk(folder) if on_disk else Memory() for name in datasets}
        own = {name: _read(name, source, columns, stores[name], reading) for name in datasets}
        loaded = stores, own
    if keep:
        context.cache[key] = loaded
    stores, own = loaded
    everyone: list[dict[str, Summary]] = collective.all_gather(own)
    summaries = {name: [each[name] for each in everyone] for name in datasets}
    schema = agree(summaries)
    return {
        name: Shard(name, stores[name], summaries[name], rank, schema, columns) for name in datasets
    }


def _read(
    name: str, source: Source | None, columns: Columns, store: Store, reading: Reading | None
) -> Summary:
    if source is not None:
        return read(name, source(name), columns, store, reading)
    shard: Any = get_dataset_shard(name)  # its annotation is that of Ray Data's iterator
    tables = shard.arrow_tables()
    return read(name, tables, columns, store, reading, in_object_store=shard.in_object_store)
