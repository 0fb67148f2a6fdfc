"""Console lines about rows of datasets that are left out or read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drawbar.train._data.shard import DatasetShard
from drawbar.train._data.streams import rows_of
from drawbar.train._rows import Read, RowPosition
from drawbar.train._settings.data_config import DataConfig


def describe_left_out(
    datasets: Mapping[str, object], config: DataConfig, world_size: int
) -> list[str]:
    """Return a line for each dataset whose rows are left out, as far as known before the start."""
    if config.equalize != "drop" or config.is_configured:
        return []
    lines = []
    for name, each in datasets.items():
        rows = None if callable(each) or not config.splits(name) else rows_of(each)
        if rows is not None and rows % world_size:
            lines.append(
                f"datasets[{name!r}]: {rows % world_size} of {rows} rows are left out, so that "
                f"{world_size} workers get equally many. Set DataConfig.equalize to change that"
            )
    return lines


def describe_resume(
    positions: Mapping[str, RowPosition],
    shards: Mapping[str, DatasetShard],
    config: DataConfig,
) -> list[str]:
    """Return a line for each dataset whose interrupted epoch cannot resume exactly.

    Args:
        positions: Position of each dataset in the checkpoint.
        shards: Shards of one rank, made for these positions.
        config: How the datasets are split.
    """
    lines = []
    for name, shard in shards.items():
        position = positions.get(name, RowPosition())
        part = shard.part
        if not position.read:
            continue
        if shard.is_restarted_from(position):
            rows = sum(each.workers * each.rows for each in position.read)
            lines.append(
                f"datasets[{name!r}]: epoch {position.epoch} restarts from its beginning, and "
                f"{rows} rows that were read before are read again. {_cause(config)}"
            )
        elif part.alike and config.splits(name) and config.equalize == "drop":
            bound = max_left_out(position.read, part.of)
            if position.read[-1].workers != part.of and bound:
                lines.append(
                    f"datasets[{name!r}]: up to {bound} rows of epoch {position.epoch} are left "
                    "out, so that workers get equally many rows at each number of workers"
                )
    return lines


def max_left_out(read: Sequence[Read], world_size: int) -> int:
    """Return how many rows of a streamed epoch `equalize="drop"` may leave out.

    At each number of workers, it is one less than that number.
    """
    sizes = [each.workers for each in read] + [world_size]
    changes = [size for before, size in zip([0, *sizes], sizes, strict=False) if size != before]
    return sum(size - 1 for size in changes)


def _cause(config: DataConfig) -> str:
    if config.group_column is not None:
        return f"DataConfig.group_column={config.group_column!r} keeps no position in an epoch"
    return "DataConfig has changed so that the order of its rows is not fixed"
