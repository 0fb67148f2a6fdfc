"""Console lines about rows of datasets that are left out or read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drawbar.train._config.data_config import DataConfig
from drawbar.train._data.shard import DatasetShard
from drawbar.train._data.streams import count_rows_or_none
from drawbar.train._row_positions import RowPosition, RowsRead


def describe_left_out_rows(
    datasets: Mapping[str, object], config: DataConfig, world_size: int
) -> list[str]:
    """Return a line for each dataset whose rows are left out, as far as known before the start."""
    if config.uneven_rows != "drop" or config.has_custom_split:
        return []
    lines = []
    for name, dataset in datasets.items():
        is_known = not callable(dataset) and config.is_split(name)
        rows = count_rows_or_none(dataset) if is_known else None
        if rows is not None and rows % world_size:
            lines.append(
                f"datasets[{name!r}]: {rows % world_size} of {rows} rows are left out, so that "
                f"all {world_size} workers get the same number of rows. Set "
                "DataConfig.uneven_rows to change this"
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
        part = shard.spec
        if not position.rows_read:
            continue
        if shard.is_restarted_from(position):
            rows = sum(reads.num_workers * reads.rows_per_worker for reads in position.rows_read)
            lines.append(
                f"datasets[{name!r}]: epoch {position.epoch} restarts from its beginning, and "
                f"{rows} rows that were read before are read again. {_cause(config)}"
            )
        elif part.has_equal_shards and config.is_split(name) and config.uneven_rows == "drop":
            bound = max_left_out_rows(position.rows_read, part.num_shards)
            if position.rows_read[-1].num_workers != part.num_shards and bound:
                lines.append(
                    f"datasets[{name!r}]: up to {bound} rows of epoch {position.epoch} are left "
                    "out, because the number of workers has changed and each worker must get the "
                    "same number of rows"
                )
    return lines


def max_left_out_rows(read: Sequence[RowsRead], world_size: int) -> int:
    """Return how many rows of a streamed epoch `uneven_rows="drop"` may leave out.

    At each number of workers, it is one less than that number.
    """
    sizes = [reads.num_workers for reads in read] + [world_size]
    changes = [size for before, size in zip([0, *sizes], sizes, strict=False) if size != before]
    return sum(size - 1 for size in changes)


def _cause(config: DataConfig) -> str:
    if config.group_column is not None:
        return f"With DataConfig.group_column={config.group_column!r}, epochs cannot be resumed"
    return "With the changed DataConfig, the order of rows is not fixed"
