"""Open the datasets of a trainer and make the shards of each rank.

Ray Data is imported only if a dataset needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drawbar.train._config.data_config import TRAIN_DATASET_KEY, DataConfig
from drawbar.train._data.map_style import is_map_style, shard_map_style
from drawbar.train._data.materialized_split import (
    MaterializedSplits,
    check_even_rows,
    check_has_rows,
)
from drawbar.train._data.shard import DatasetShard, ShardSpec
from drawbar.train._data.streams import count_rows_or_none, shard_stream
from drawbar.train._data.tables import (
    is_path_or_paths,
    is_table,
    read_parquet,
    shard_table,
    to_arrow_table,
)
from drawbar.train._frames import warn_caller
from drawbar.train._ray_compat import get_base_dataset, is_data_iterator
from drawbar.train._row_positions import RowPosition, split_rows

if TYPE_CHECKING:
    from ray.data import Dataset


def check_datasets(datasets: Mapping[str, object] | None, config: DataConfig) -> None:
    """Check the names and types of datasets before anything starts.

    Warns about names in `DataConfig` that no dataset has.

    Raises:
        TypeError: The argument is not a mapping of names to datasets or dataset factories.
    """
    if datasets is not None and not isinstance(datasets, Mapping):
        raise TypeError(
            "datasets must be a dict of name to ray.data.Dataset, table or path, such as "
            f"{{'{TRAIN_DATASET_KEY}': frame}}, found {_describe_value(datasets)}"
        )
    for name, dataset in (datasets or {}).items():
        if not callable(dataset):
            _check_dataset_type(name, dataset)
    named = set() if config.datasets_to_split == "all" else set(config.datasets_to_split)
    unknown = named - set(datasets or {}) - {TRAIN_DATASET_KEY}
    if unknown:
        warn_caller(
            f"DataConfig.datasets_to_split names {sorted(unknown)}, but datasets has "
            f"{sorted(datasets or {})}: each worker reads all rows of the datasets that are not "
            "split"
        )


def _check_dataset_type(name: str, dataset: object) -> None:
    checks = (_is_ray_dataset, is_table, is_path_or_paths, is_map_style)
    if not any(check(dataset) for check in checks):
        raise TypeError(
            f"datasets[{name!r}] must be a ray.data.Dataset, a table (pandas, Arrow, Hugging "
            "Face), the path of Parquet files, a PyTorch map-style dataset, or a function that "
            f"returns one of these, found {_describe_value(dataset)}. Create one with "
            "ray.data.from_items, read_csv ..."
        )


def _is_ray_dataset(dataset: object) -> bool:
    return hasattr(dataset, "streaming_split")


def _describe_value(value: object) -> str:
    """Return a short description of a value, whose repr may be long."""
    short = repr(value)
    if len(short) <= 80 and "\n" not in short:
        return short
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def open_datasets(datasets: Mapping[str, object]) -> dict[str, object]:
    """Read tables and files. Dataset factories are called later."""
    return {
        name: dataset if callable(dataset) else _open_dataset(name, dataset)
        for name, dataset in datasets.items()
    }


def make_datasets(datasets: Mapping[str, object]) -> dict[str, Any]:
    """Call dataset factories.

    Raises:
        TypeError: A factory returns something else than a dataset.
    """
    return {
        name: _open_dataset(name, dataset()) if callable(dataset) else dataset
        for name, dataset in datasets.items()
    }


def _open_dataset(name: str, dataset: object) -> object:
    if _is_ray_dataset(dataset) or is_map_style(dataset):
        return dataset
    _check_dataset_type(name, dataset)
    try:
        return to_arrow_table(dataset) if is_table(dataset) else read_parquet(dataset)
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"datasets[{name!r}] cannot be read as a table: {_describe_value(dataset)}; "
            f"{type(error).__name__}: {error}"
        ) from error


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
        if _is_ray_dataset(dataset)
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
        check_has_rows(name, rows, world_size if is_cut else 1)


def make_shards(
    datasets: Mapping[str, Any],
    config: DataConfig,
    node_ids: Sequence[str],
    positions: Mapping[str, Any],
    materialized: MaterializedSplits,
    remaining_resources: Mapping[str, float] | None = None,
) -> list[dict[str, DatasetShard]]:
    """Return the shards of each rank by dataset name.

    Args:
        datasets: Datasets by name.
        config: Which datasets to split, and how Ray Data executes them.
        node_ids: Node id of each rank; its length is the world size.
        positions: Data positions from which the attempt resumes.
        materialized: Materialized splits of the run.
        remaining_resources: Resources that the workers do not use, as far as they are known.
    """
    if config.has_custom_split:
        return _make_custom_shards(datasets, config, node_ids, positions)
    shards: list[dict[str, DatasetShard]] = [{} for _ in node_ids]
    for name, dataset in datasets.items():
        position = RowPosition.decode(positions.get(make_position_key(name)))
        if config.is_split(name) and not _is_ray_dataset(dataset):
            # A dataset factory may return more rows than at the start of the run.
            check_even_rows(name, len(dataset), len(node_ids), config.uneven_rows)
        if is_map_style(dataset):
            rank_shards = shard_map_style(name, dataset, config, len(node_ids), position)
        elif not _is_ray_dataset(dataset):
            rank_shards = shard_table(name, dataset, config, len(node_ids), position)
        elif config.is_materialized_split(name):
            rank_shards = _make_materialized_shards(
                name, dataset, config, len(node_ids), position, materialized
            )
        else:
            rank_shards = shard_stream(
                name, dataset, config, node_ids, position, remaining_resources or {}
            )
        for by_name, shard in zip(shards, rank_shards, strict=True):
            by_name[name] = shard
    return shards


def _make_materialized_shards(
    name: str,
    dataset: Dataset,
    config: DataConfig,
    world_size: int,
    position: RowPosition,
    materialized: MaterializedSplits,
) -> list[DatasetShard]:
    parts = materialized.get_shards(name, dataset, config, world_size)
    first = (
        materialized.get_unread_shards(name, config.uneven_rows, world_size, position)
        if position.rows_read
        else None
    )
    rows, by_number = materialized.count(name), config.group_column is None
    bounds = split_rows(rows, world_size, config.uneven_rows)
    return [
        DatasetShard(
            part,
            ShardSpec(
                dataset=name,
                shard_index=number,
                num_shards=world_size,
                num_rows=bounds[number][1] - bounds[number][0] if by_number else None,
                total_rows=rows if by_number else None,
                uneven_rows=config.uneven_rows,
            ),
            position=position if first else position.rewind_epoch(),
            unread_source=first[number] if first else None,
        )
        for number, part in enumerate(parts)
    ]


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
            f"each of {world_size} workers, found {_describe_value(iterators)}"
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
    check_has_rows(name, sum(known), 1)
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


def to_ray_datasets(datasets: Mapping[str, object]) -> dict[str, Dataset]:
    """Convert tables and map-style datasets to Ray Data datasets."""
    return {name: _to_ray_dataset(dataset) for name, dataset in datasets.items()}


def _to_ray_dataset(source: Any) -> Dataset:
    import ray.data

    if _is_ray_dataset(source):
        dataset: Dataset = source
    elif is_map_style(source):
        dataset = ray.data.from_torch(source)
    else:
        dataset = ray.data.from_blocks([source])
    return dataset


def materialize_splits(
    datasets: Mapping[str, Any],
    config: DataConfig,
    world_sizes: Sequence[int],
    materialized: MaterializedSplits,
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
        if not _is_ray_dataset(source):
            for size in world_sizes:
                check_even_rows(name, len(source), size, config.uneven_rows)
            continue
        dataset = config.apply_options(name, source)
        for size in world_sizes:
            materialized.get_shards(name, dataset, config, size)


def make_position_key(dataset_name: str) -> str:
    """Return the key of a dataset's position in a checkpoint."""
    return f"dataset:{dataset_name}"


def fetch_shards(reference: Any) -> dict[str, DatasetShard]:
    """Return a rank's shards, from the object store if they are a reference."""
    if reference is None:
        return {}
    if isinstance(reference, dict):
        return reference
    import ray

    shards: dict[str, DatasetShard] = ray.get(reference)
    return shards
