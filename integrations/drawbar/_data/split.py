"""Make the shards of each rank from the datasets of a run.

Ray Data is imported only if a dataset needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drawbar._base.ray_compat import get_base_dataset, is_data_iterator
from drawbar._data import indexed
from drawbar._data.data_config import DataConfig
from drawbar._data.row_positions import RowPosition, RowsRead
from drawbar._data.shard import DatasetShard, ShardSpec
from drawbar._data.streams import count_rows_or_none, shard_stream
from drawbar._data.user_datasets import (
    describe_value,
    is_map_style,
    is_ray_dataset,
    to_ray_datasets,
)

MaterializedDatasets = dict[str, indexed.IndexedBlocks]
"""Datasets of a run that are split by row number, by name. Each is materialized on first use."""


def list_streamed(datasets: Mapping[str, object], config: DataConfig) -> list[str]:
    """Return the names of opened datasets that Ray Data executes while they are read."""
    names = list_datasets_to_execute(datasets, config)
    return [name for name in names if not config.is_materialized_split(name)]


def list_datasets_to_execute(datasets: Mapping[str, object], config: DataConfig) -> list[str]:
    """Return the names of the datasets that Ray Data has to execute.

    Dataset factories are left out, since they are called later.
    """
    transforms = config.preprocessor is not None  # also applied to materialized datasets
    return [
        name
        for name, dataset in datasets.items()
        if is_ray_dataset(dataset)
        and (transforms or config.shuffles(name) or count_rows_or_none(dataset) is None)
    ]


def select_materialized(datasets: Mapping[str, object], config: DataConfig) -> dict[str, object]:
    """Return the datasets that are materialized and split by row number."""
    return {
        name: dataset for name, dataset in datasets.items() if config.is_materialized_split(name)
    }


def check_row_counts(datasets: Mapping[str, object], config: DataConfig, world_size: int) -> None:
    """Check that workers get rows of each dataset whose row count is known without computing it.

    Raises:
        ValueError: A dataset has too few rows for the number of workers.
    """
    for name, dataset in datasets.items():
        rows = None if callable(dataset) else count_rows_or_none(dataset)
        if rows is None:
            continue
        if not rows and not getattr(dataset, "column_names", True):
            raise ValueError(f"datasets[{name!r}] has no columns, only an index")
        is_cut = (
            config.is_split(name) and config.uneven_rows == "drop" and not config.has_custom_split
        )
        indexed.check_has_rows(name, rows, world_size if is_cut else 1)


def make_shards(
    datasets: Mapping[str, Any],
    config: DataConfig,
    node_ids: Sequence[str],
    positions: Mapping[str, Any],
    materialized: MaterializedDatasets,
    remaining_resources: Mapping[str, float] | None = None,
) -> list[dict[str, DatasetShard]]:
    """Return the shards of each rank by dataset name.

    Args:
        datasets: Datasets by name.
        config: Which datasets to split, and how Ray Data executes them.
        node_ids: Node id of each rank; its length is the world size.
        positions: Data positions from which the attempt resumes.
        materialized: Materialized datasets of the run.
        remaining_resources: Resources that the workers do not use, as far as they are known.
    """
    if config.has_custom_split:
        return _make_custom_shards(datasets, config, node_ids, positions)
    shards: list[dict[str, DatasetShard]] = [{} for _ in node_ids]
    for name, dataset in datasets.items():
        position = RowPosition.decode(positions.get(make_position_key(name)))
        if is_ray_dataset(dataset) and not config.is_materialized_split(name):
            rank_shards = shard_stream(
                name, dataset, config, node_ids, position, remaining_resources or {}
            )
        else:
            rows = _index_dataset(name, dataset, config, materialized)
            rank_shards = indexed.shard_by_row_number(name, rows, config, len(node_ids), position)
        for by_name, shard in zip(shards, rank_shards, strict=True):
            by_name[name] = shard
    return shards


def _index_dataset(
    name: str, dataset: Any, config: DataConfig, materialized: MaterializedDatasets
) -> indexed.IndexedDataset:
    """Return a dataset that is split by row number."""
    if is_map_style(dataset):
        return indexed.IndexedItems(name, dataset, config)
    if not is_ray_dataset(dataset):
        return indexed.IndexedTable.open(name, dataset, config)
    if name not in materialized:
        materialized[name] = indexed.IndexedBlocks.materialize(name, dataset, config)
    return materialized[name]


def _make_custom_shards(
    datasets: Mapping[str, Any],
    config: DataConfig,
    node_ids: Sequence[str],
    positions: Mapping[str, Any],
) -> list[dict[str, DatasetShard]]:
    """Return the shards that `configure` of the user's subclass returns."""
    world_size = len(node_ids)
    iterators = config.configure(
        to_ray_datasets(datasets), world_size, worker_handles=None, worker_node_ids=list(node_ids)
    )
    is_valid = len(iterators) == world_size
    if not is_valid or not all(isinstance(by_name, Mapping) for by_name in iterators):
        raise TypeError(
            f"{type(config).__name__}.configure() must return a dict of name to DataIterator for "
            f"each of {world_size} workers, found {describe_value(iterators)}"
        )
    for name in {name: None for by_name in iterators for name in by_name}:
        rows_per_rank = [_count_iterator_rows(by_name.get(name)) for by_name in iterators]
        _check_custom_shards(name, config, rows_per_rank)
    return [
        {
            name: DatasetShard(
                rows,
                ShardSpec(
                    dataset=name,
                    shard_index=rank if config.is_split(name) else 0,
                    num_shards=world_size if config.is_split(name) else 1,
                    uneven_rows=config.uneven_rows,
                    is_ordered=False,
                ),
                position=RowPosition.decode(positions.get(make_position_key(name))).rewind_epoch(),
            )
            for name, rows in by_name.items()
        }
        for rank, by_name in enumerate(iterators)
    ]


def _check_custom_shards(name: str, config: DataConfig, rows: Sequence[int | None]) -> None:
    """Check that the shards of a subclass have rows and equal lengths, if their rows are known.

    Raises:
        ValueError: No rank gets a row, or ranks get different numbers of rows and `uneven_rows` is
            not "keep".
    """
    known = [count for count in rows if count is not None]
    if len(known) < len(rows):
        return
    indexed.check_has_rows(name, sum(known), 1)
    if config.is_split(name) and config.uneven_rows != "keep" and len(set(known)) > 1:
        raise ValueError(
            f"{type(config).__name__}.configure() gives the ranks different numbers of rows of "
            f"datasets[{name!r}]: {known}. Workers that wait for each other at each batch could "
            "hang. Give each rank the same number of rows. If the training function supports "
            'uneven shards, set uneven_rows="keep"'
        )


def _count_iterator_rows(iterator: object) -> int | None:
    """Return the number of rows of an iterator, None if its dataset is not materialized."""
    dataset = get_base_dataset(iterator)
    return None if dataset is None else count_rows_or_none(dataset)


def list_streamed_shards(shards: Sequence[Mapping[str, DatasetShard]]) -> list[str]:
    """Return the names of datasets that are computed while ranks read them, as far as known."""
    names = {
        name
        for by_name in shards
        for name, shard in by_name.items()
        if is_data_iterator(shard) and _count_iterator_rows(shard) is None
    }
    return sorted(names)


def materialize_splits(
    datasets: Mapping[str, Any],
    config: DataConfig,
    world_sizes: Sequence[int],
    materialized: MaterializedDatasets,
) -> None:
    """Materialize the datasets that need it, and split them for each possible world size.

    Args:
        datasets: Opened datasets of `select_materialized`.
        config: How to split the datasets.
        world_sizes: Numbers of workers.
        materialized: Receives the splits.

    Raises:
        ValueError: `uneven_rows="error"`, and a dataset cannot be divided evenly.
    """
    for name, source in datasets.items():
        if not is_ray_dataset(source):
            for size in world_sizes:
                indexed.check_even_rows(name, len(source), size, config.uneven_rows)
            continue
        rows = _index_dataset(name, source, config, materialized)
        for size in world_sizes:
            indexed.check_has_rows(name, rows.num_rows, 1)
            indexed.check_even_rows(name, rows.num_rows, size, config.uneven_rows)
            rows.make_sources(size, config.uneven_rows)


def make_position_key(dataset_name: str) -> str:
    """Return the key of a dataset's position in a checkpoint."""
    return f"dataset:{dataset_name}"


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
        if len(shard.start_position.discarded) > len(position.discarded):
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
