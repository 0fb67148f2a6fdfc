"""Ray Data datasets, streamed: equally long parts that all ranks read at the same time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from drawbar.train._data.shard import DatasetShard, Part
from drawbar.train._rows import Read, RowPosition, rest
from drawbar.train._settings.data_config import DataConfig, with_options
from drawbar.train._threads import DaemonThreads

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset

STREAM_END_SECONDS = 0.5


def shard_stream(
    name: str,
    given: Dataset,
    config: DataConfig,
    node_ids: Sequence[str],
    position: RowPosition,
    left: Mapping[str, float],
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
    dataset = _within(config.with_options(name, given), left)
    ordered = dataset.context.execution_options.preserve_order
    world_size = len(node_ids) if config.splits(name) else 1
    hints = list(node_ids) if config.enable_shard_locality else None
    if not ordered:
        position = position.begun()
    executed = position.epoch - position.cut_short
    rows = rows_of(given)
    first, owners = _rest(
        _executed(dataset, executed), position, world_size, in_memory=rows is not None
    )
    parts = _split(_executed(dataset, executed + bool(first)), world_size, hints)
    numbers = range(world_size) if config.splits(name) else [0] * len(node_ids)
    each = None if rows is None else rows // world_size
    return [
        DatasetShard(
            parts[number],
            Part(
                dataset=name,
                number=number,
                of=world_size,
                rows=each,
                ordered=ordered,
                alike=True,
            ),
            position=position,
            rest=first[number] if first else None,
            owners=owners,
        )
        for number in numbers
    ]


def _within(dataset: Dataset, left: Mapping[str, float]) -> Dataset:
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
        cpu=min(limits.cpu, left.get("CPU", math.inf)),
        gpu=min(limits.gpu, left.get("GPU", math.inf)),
    )
    return dataset


def _executed(dataset: Dataset, times: int) -> Dataset:
    """Have Ray Data count on from so many executions: its shuffles of files follow from that."""
    counted: Dataset = with_options(dataset, dataset.context.execution_options)
    counted.context._execution_idx = times
    return counted


def rows_of(dataset: Any) -> int | None:
    """Count the rows of a dataset or table, unless it would have to be computed for that."""
    if not hasattr(dataset, "streaming_split"):
        return len(dataset)
    from ray.data.dataset import MaterializedDataset

    return dataset.count() if isinstance(dataset, MaterializedDataset) else None


def _split(dataset: Dataset, world_size: int, hints: list[str] | None = None) -> list[DataIterator]:
    """Give the parts of a dataset, equally long."""
    if world_size == 1:
        return [dataset.iterator()]
    parts: list[DataIterator] = dataset.streaming_split(
        world_size, equal=True, locality_hints=hints
    )
    return parts


def _rest(
    dataset: Dataset, position: RowPosition, world_size: int, *, in_memory: bool
) -> tuple[list[DataIterator], list[object]]:
    """Give the parts of what has not been read of a dataset, and what must live meanwhile.

    A dataset that lies in memory is gone through here, without a task: workers may hold every CPU.
    """
    if not position.read:
        return [], []
    owners: list[object] = []
    left: list[Any] = rest(
        dataset,
        position.read,
        world_size,
        split=partial(_split_owned, owners=owners),
        leave_out=partial(_leave_out, epoch=position.epoch, in_memory=in_memory),
        join=_join,
    )
    return [each.iterator() if hasattr(each, "iterator") else each for each in left], owners


def _split_owned(dataset: Dataset, world_size: int, owners: list[object]) -> list[Any]:
    parts = _split(dataset, world_size)
    owners.append(parts)  # whose actor owns the rows
    return parts


def _leave_out(parts: list[Any], read: Read, epoch: int, *, in_memory: bool) -> list[Any]:
    """Compute what is left of each part; all are read at the same time."""
    with DaemonThreads(len(parts), "drawbar-split") as pool:
        left = partial(_left, read=read, epoch=epoch, in_memory=in_memory)
        return list(pool.map(left, range(len(parts)), parts))


def _left(number: int, part: Any, *, read: Read, epoch: int, in_memory: bool) -> Dataset:
    import ray.data

    if read.shuffle is None and not in_memory:
        left: Dataset = part.materialize().split_at_indices([read.rows])[1]
        return left
    shuffle = read.shuffle
    options = {"batch_size": None} if shuffle is None else shuffle.options(epoch, number)
    tables, seen = [], 0
    source = part.iterator() if hasattr(part, "iterator") else part
    for table in source.iter_batches(**options, batch_format="pyarrow"):
        tables.append(table.slice(max(read.rows - seen, 0)))
        seen += table.num_rows
    rest_of_tables: Dataset = ray.data.from_blocks(tables)
    return rest_of_tables


def _join(parts: list[Any]) -> Dataset:
    first, *others = parts
    joined: Dataset = with_options(first.union(*others) if others else first, None)
    return joined


def end_streams(shards: Iterable[Mapping[str, DatasetShard]]) -> None:
    """End the actors of Ray Data that hand out the rows of shards which nobody reads any more.

    One that Ray ends while it has rows left aborts, and the driver shows its C++ stack.
    """
    import ray

    actors = {each for by_name in shards for shard in by_name.values() for each in shard.streams}
    if actors:
        stopped = [each.shutdown_executor.remote() for each in actors]
        ray.wait(stopped, num_returns=len(stopped), timeout=STREAM_END_SECONDS)
    for each in actors:
        ray.kill(each)
