"""Shard streamed Ray Data datasets into equal parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from drawbar._base.ray_compat import set_execution_index
from drawbar._data.data_config import DataConfig, with_options
from drawbar._data.row_positions import RowPosition, RowsRead, split_unread
from drawbar._data.shard import DatasetShard, ShardSpec
from drawbar._process.threads import DaemonThreadPool

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset

STREAM_SHUTDOWN_TIMEOUT_S = 0.5


def shard_stream(
    name: str,
    dataset: Dataset,
    config: DataConfig,
    node_ids: Sequence[str],
    position: RowPosition,
    remaining_resources: Mapping[str, float],
) -> list[DatasetShard]:
    """Return each rank's shard of a dataset: an equal part of its stream, or a complete stream.

    If the position is within an epoch, the dataset is read once to find the unread rows.

    Args:
        name: Name of the dataset.
        dataset: The dataset.
        config: Whether to split the dataset, and how Ray Data executes it.
        node_ids: Node id of each rank.
        position: Position to resume from.
        remaining_resources: Resources that the workers do not use, as far as they are known.
    """
    stream = _limit_resources(config.apply_options(name, dataset), remaining_resources)
    is_ordered = stream.context.execution_options.preserve_order
    world_size = len(node_ids) if config.is_split(name) else 1
    hints = list(node_ids) if config.enable_shard_locality else None
    if not is_ordered:
        position = position.rewind_epoch()
    executed = position.epoch - position.num_incomplete_epochs
    rows = count_rows_or_none(dataset)
    first, keep_alive = _make_unread_iterators(
        _set_execution_index(stream, executed), position, world_size, in_memory=rows is not None
    )
    parts = _split_stream(_set_execution_index(stream, executed + bool(first)), world_size, hints)
    numbers = range(world_size) if config.is_split(name) else [0] * len(node_ids)
    rows_per_shard = None if rows is None else rows // world_size
    return [
        DatasetShard(
            parts[number],
            ShardSpec(
                dataset=name,
                shard_index=number,
                num_shards=world_size,
                num_rows=rows_per_shard,
                is_ordered=is_ordered,
                has_equal_shards=True,
            ),
            position=position,
            unread_source=first[number] if first else None,
            keep_alive=keep_alive,
        )
        for number in numbers
    ]


def _limit_resources(dataset: Dataset, remaining_resources: Mapping[str, float]) -> Dataset:
    """Limit a dataset to the resources that the workers do not use, or to lower limits of the user.

    Without limits, Ray Data plans with all CPUs of the cluster, including the workers' CPUs.
    `exclude_resources` would not work: Ray Data divides the cluster between all datasets that are
    read at the same time and subtracts the excluded resources from each share. Two datasets next to
    workers that hold half of the CPUs would then get none. Ray Data would run only one task at a
    time, and no task while a rank waits for another one and reads no rows.
    """
    options = dataset.context.execution_options
    limits = options.resource_limits
    options.resource_limits = limits.copy(
        cpu=min(limits.cpu, remaining_resources.get("CPU", math.inf)),
        gpu=min(limits.gpu, remaining_resources.get("GPU", math.inf)),
    )
    return dataset


def _set_execution_index(dataset: Dataset, times: int) -> Dataset:
    """Return a copy with the given number of executions, which seeds Ray Data's file shuffling."""
    counted: Dataset = with_options(dataset, dataset.context.execution_options)
    set_execution_index(counted.context, times)
    return counted


def count_rows_or_none(dataset: Any) -> int | None:
    """Return the number of rows, or None if the dataset would have to be computed for it."""
    if not hasattr(dataset, "streaming_split"):
        return len(dataset)
    from ray.data.dataset import MaterializedDataset

    return dataset.count() if isinstance(dataset, MaterializedDataset) else None


def _split_stream(
    dataset: Dataset, world_size: int, hints: list[str] | None = None
) -> list[DataIterator]:
    """Split a dataset into equal parts."""
    if world_size == 1:
        return [dataset.iterator()]
    parts: list[DataIterator] = dataset.streaming_split(
        world_size, equal=True, locality_hints=hints
    )
    return parts


def _make_unread_iterators(
    dataset: Dataset, position: RowPosition, world_size: int, *, in_memory: bool
) -> tuple[list[DataIterator], list[object]]:
    """Return iterators over the unread rows of a dataset, and objects that must stay alive.

    Datasets in memory are read in this process without a task, since workers may use all CPUs.
    """
    if not position.rows_read:
        return [], []
    keep_alive: list[object] = []
    datasets: list[Any] = split_unread(
        dataset,
        position.rows_read,
        world_size,
        split=partial(_split_and_keep_alive, keep_alive=keep_alive),
        exclude=partial(_exclude_read_rows, epoch=position.epoch, in_memory=in_memory),
        concat=_concat_datasets,
    )
    iterators = [part.iterator() if hasattr(part, "iterator") else part for part in datasets]
    return iterators, keep_alive


def _split_and_keep_alive(dataset: Dataset, world_size: int, keep_alive: list[object]) -> list[Any]:
    parts = _split_stream(dataset, world_size)
    keep_alive.append(parts)  # Their actor owns the rows.
    return parts


def _exclude_read_rows(
    parts: list[Any], read: RowsRead, epoch: int, *, in_memory: bool
) -> list[Any]:
    """Return the unread rows of each part. All parts are read at the same time."""
    with DaemonThreadPool(len(parts), "drawbar-split") as pool:
        drop_read_rows = partial(_drop_read_rows, read=read, epoch=epoch, in_memory=in_memory)
        return list(pool.map(drop_read_rows, range(len(parts)), parts))


def _drop_read_rows(
    number: int, part: Any, *, read: RowsRead, epoch: int, in_memory: bool
) -> Dataset:
    import ray.data

    if read.shuffle is None and not in_memory:
        _, unread = part.materialize().split_at_indices([read.rows_per_worker])
        return unread  # type: ignore[no-any-return]
    shuffle = read.shuffle
    options = (
        {"batch_size": None} if shuffle is None else shuffle.make_iterator_options(epoch, number)
    )
    tables, num_rows = [], 0
    source = part.iterator() if hasattr(part, "iterator") else part
    for table in source.iter_batches(**options, batch_format="pyarrow"):
        tables.append(table.slice(max(read.rows_per_worker - num_rows, 0)))
        num_rows += table.num_rows
    dataset: Dataset = ray.data.from_blocks(tables)
    return dataset


def _concat_datasets(parts: list[Any]) -> Dataset:
    first, *others = parts
    joined: Dataset = with_options(first.union(*others) if others else first, None)
    return joined


def shut_down_streams(shards: Iterable[Mapping[str, DatasetShard]]) -> None:
    """Shut down the actors of Ray Data that distribute rows of shards that are no longer read.

    If Ray ends an actor that has rows left, the actor aborts, and the driver prints its C++ stack.
    """
    import ray

    actors = {
        actor
        for by_name in shards
        for shard in by_name.values()
        for actor in shard.split_coordinators
    }
    if actors:
        shutdowns = [actor.shutdown_executor.remote() for actor in actors]
        ray.wait(shutdowns, num_returns=len(shutdowns), timeout=STREAM_SHUTDOWN_TIMEOUT_S)
    for actor in actors:
        ray.kill(actor)
