"""Ray Data datasets, streamed: equally long parts that all ranks read at the same time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from drawbar.train._config.data_config import DataConfig, with_options
from drawbar.train._data.shard import DatasetShard, ShardSpec
from drawbar.train._row_positions import RowPosition, RowsRead, split_unread
from drawbar.train._threads import DaemonThreadPool

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset

STREAM_SHUTDOWN_TIMEOUT_S = 0.5


def shard_stream(
    name: str,
    given: Dataset,
    config: DataConfig,
    node_ids: Sequence[str],
    position: RowPosition,
    remaining_resources: Mapping[str, float],
) -> list[DatasetShard]:
    """Give each rank its shard of a dataset: an even part of its stream, or a stream of the whole.

    A dataset whose position is inside an epoch is read once here, to find what is left.

    Args:
        name: Name of the dataset.
        given: The dataset.
        config: Whether to split it, and how Ray Data runs it.
        node_ids: The node of each rank.
        position: Where it is to go on.
        left: The resources that the workers leave, as far as they are counted.
    """
    dataset = _limit_resources(config.apply_options(name, given), remaining_resources)
    ordered = dataset.context.execution_options.preserve_order
    world_size = len(node_ids) if config.is_split(name) else 1
    hints = list(node_ids) if config.enable_shard_locality else None
    if not ordered:
        position = position.rewind_epoch()
    executed = position.epoch - position.num_incomplete_epochs
    rows = count_rows_or_none(given)
    first, keep_alive = _make_unread_iterators(
        _set_execution_index(dataset, executed), position, world_size, in_memory=rows is not None
    )
    parts = _split_stream(_set_execution_index(dataset, executed + bool(first)), world_size, hints)
    numbers = range(world_size) if config.is_split(name) else [0] * len(node_ids)
    each = None if rows is None else rows // world_size
    return [
        DatasetShard(
            parts[number],
            ShardSpec(
                dataset=name,
                shard_index=number,
                num_shards=world_size,
                num_rows=each,
                is_ordered=ordered,
                has_equal_shards=True,
            ),
            position=position,
            unread_source=first[number] if first else None,
            keep_alive=keep_alive,
        )
        for number in numbers
    ]


def _limit_resources(dataset: Dataset, remaining_resources: Mapping[str, float]) -> Dataset:
    """Have a dataset use what the workers leave, unless the user has set its limits.

    Ray Data counts on the whole cluster otherwise, and plans with CPUs that it never gets. These
    are limits and not `exclude_resources`: Ray Data shares the cluster among all that is read at
    the same time, and takes those off each share. Two datasets beside workers that hold half of the
    CPUs would have none: one task at a time, and none at all while a rank that waits for another
    one has rows that it does not take.
    """
    options = dataset.context.execution_options
    limits = options.resource_limits
    options.resource_limits = limits.copy(
        cpu=min(limits.cpu, remaining_resources.get("CPU", math.inf)),
        gpu=min(limits.gpu, remaining_resources.get("GPU", math.inf)),
    )
    return dataset


def _set_execution_index(dataset: Dataset, times: int) -> Dataset:
    """Have Ray Data count on from so many executions: its shuffles of files follow from that."""
    counted: Dataset = with_options(dataset, dataset.context.execution_options)
    counted.context._execution_idx = times
    return counted


def count_rows_or_none(dataset: Any) -> int | None:
    """Count the rows of a dataset or table, unless it would have to be computed for that."""
    if not hasattr(dataset, "streaming_split"):
        return len(dataset)
    from ray.data.dataset import MaterializedDataset

    return dataset.count() if isinstance(dataset, MaterializedDataset) else None


def _split_stream(
    dataset: Dataset, world_size: int, hints: list[str] | None = None
) -> list[DataIterator]:
    """Give the parts of a dataset, equally long."""
    if world_size == 1:
        return [dataset.iterator()]
    parts: list[DataIterator] = dataset.streaming_split(
        world_size, equal=True, locality_hints=hints
    )
    return parts


def _make_unread_iterators(
    dataset: Dataset, position: RowPosition, world_size: int, *, in_memory: bool
) -> tuple[list[DataIterator], list[object]]:
    """Give the parts of what has not been read of a dataset, and what must live meanwhile.

    A dataset that lies in memory is gone through here, without a task: workers may hold every CPU.
    """
    if not position.rows_read:
        return [], []
    keep_alive: list[object] = []
    remaining_resources: list[Any] = split_unread(
        dataset,
        position.rows_read,
        world_size,
        split=partial(_split_and_keep_alive, keep_alive=keep_alive),
        exclude=partial(_exclude_read_rows, epoch=position.epoch, in_memory=in_memory),
        concat=_concat_datasets,
    )
    return [
        each.iterator() if hasattr(each, "iterator") else each for each in remaining_resources
    ], keep_alive


def _split_and_keep_alive(dataset: Dataset, world_size: int, keep_alive: list[object]) -> list[Any]:
    parts = _split_stream(dataset, world_size)
    keep_alive.append(parts)  # whose actor owns the rows
    return parts


def _exclude_read_rows(
    parts: list[Any], read: RowsRead, epoch: int, *, in_memory: bool
) -> list[Any]:
    """Compute what is left of each part; all are read at the same time."""
    with DaemonThreadPool(len(parts), "drawbar-split") as pool:
        remaining_resources = partial(_drop_read_rows, read=read, epoch=epoch, in_memory=in_memory)
        return list(pool.map(remaining_resources, range(len(parts)), parts))


def _drop_read_rows(
    number: int, part: Any, *, read: RowsRead, epoch: int, in_memory: bool
) -> Dataset:
    import ray.data

    if read.shuffle is None and not in_memory:
        remaining_resources: Dataset = part.materialize().split_at_indices([read.rows_per_worker])[
            1
        ]
        return remaining_resources
    shuffle = read.shuffle
    options = (
        {"batch_size": None} if shuffle is None else shuffle.make_iterator_options(epoch, number)
    )
    tables, seen = [], 0
    source = part.iterator() if hasattr(part, "iterator") else part
    for table in source.iter_batches(**options, batch_format="pyarrow"):
        tables.append(table.slice(max(read.rows_per_worker - seen, 0)))
        seen += table.num_rows
    rest_of_tables: Dataset = ray.data.from_blocks(tables)
    return rest_of_tables


def _concat_datasets(parts: list[Any]) -> Dataset:
    first, *others = parts
    joined: Dataset = with_options(first.union(*others) if others else first, None)
    return joined


def shut_down_streams(shards: Iterable[Mapping[str, DatasetShard]]) -> None:
    """End the actors of Ray Data that hand out the rows of shards which nobody reads any more.

    One that Ray ends while it has rows left aborts, and the driver shows its C++ stack.
    """
    import ray

    actors = {
        each
        for by_name in shards
        for shard in by_name.values()
        for each in shard.split_coordinators
    }
    if actors:
        stopped = [each.shutdown_executor.remote() for each in actors]
        ray.wait(stopped, num_returns=len(stopped), timeout=STREAM_SHUTDOWN_TIMEOUT_S)
    for each in actors:
        ray.kill(each)
