"""Datasets to one shard per rank. Ray Data is imported only where a dataset is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drawbar.train._config.checks import warn_caller
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
from drawbar.train._row_positions import RowPosition, split_rows

if TYPE_CHECKING:
    from ray.data import Dataset

Opened = "Dataset | pa.Table | Callable[[], Any]"
"""A dataset that is made already, or what makes one at each start."""


def check_datasets(datasets: Mapping[str, object] | None, config: DataConfig) -> None:
    """Check the datasets' names and types before anything starts.

    Warns of a name in `DataConfig` that no dataset has.

    Raises:
        TypeError: Not a mapping of names to datasets or functions that make them.
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
            f"{sorted(datasets or {})}: those that it does not name are whole on each worker"
        )


def _check_dataset_type(name: str, dataset: object) -> None:
    kinds = (_is_ray_dataset, is_table, is_path_or_paths, is_map_style)
    if not any(is_kind(dataset) for is_kind in kinds):
        raise TypeError(
            f"datasets[{name!r}] must be a ray.data.Dataset, a table (of pandas, Arrow, Hugging "
            "Face), the path of Parquet files, a map-style dataset of PyTorch's, or a function "
            f"that gives one of these, found {_describe_value(dataset)}. Make one by "
            "ray.data.from_items, "
            "read_csv ..."
        )


def _is_ray_dataset(dataset: object) -> bool:
    return hasattr(dataset, "streaming_split")


def _describe_value(value: object) -> str:
    """Say what a value is: in short, as a table may be long."""
    short = repr(value)
    if len(short) <= 80 and "\n" not in short:
        return short
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def open_datasets(datasets: Mapping[str, object]) -> dict[str, object]:
    """Read tables and files; leave the functions that make datasets for later."""
    return {
        name: each if callable(each) else _open_dataset(name, each)
        for name, each in datasets.items()
    }


def make_datasets(datasets: Mapping[str, object]) -> dict[str, Any]:
    """Call the functions that make datasets.

    Raises:
        TypeError: One gives something else.
    """
    return {
        name: _open_dataset(name, each()) if callable(each) else each
        for name, each in datasets.items()
    }


def _open_dataset(name: str, given: object) -> object:
    if _is_ray_dataset(given) or is_map_style(given):
        return given
    _check_dataset_type(name, given)
    try:
        return to_arrow_table(given) if is_table(given) else read_parquet(given)
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"datasets[{name!r}], {_describe_value(given)}, gives no table: "
            f"{type(error).__name__}: {error}"
        ) from error


def list_streamed(datasets: Mapping[str, object], config: DataConfig) -> list[str]:
    """Name the datasets that Ray Data computes as they are read; of those that are made already."""
    return [
        name for name in list_computed(datasets, config) if not config.is_materialized_split(name)
    ]


def list_computed(datasets: Mapping[str, object], config: DataConfig) -> list[str]:
    """Return the names of the datasets that Ray Data has to compute.

    Datasets that a function makes later are left out.
    """
    transforms = config.preprocessor is not None  # also applied to materialized datasets
    return [
        name
        for name, each in datasets.items()
        if _is_ray_dataset(each)
        and (transforms or config.shuffles(name) or count_rows_or_none(each) is None)
    ]


def select_materialized(datasets: Mapping[str, object], config: DataConfig) -> dict[str, object]:
    """Give the datasets that are split exactly."""
    return {name: each for name, each in datasets.items() if config.is_materialized_split(name)}


def check_row_counts(datasets: Mapping[str, object], config: DataConfig, world_size: int) -> None:
    """Check that workers get rows of each dataset, as far as its rows are known without computing.

    Raises:
        ValueError: Of one, none of so many workers gets a row.
    """
    for name, each in datasets.items():
        rows = None if callable(each) else count_rows_or_none(each)
        if rows is None:
            continue
        if not rows and not getattr(each, "column_names", True):
            raise ValueError(f"datasets[{name!r}] has no columns, only an index, which is no data")
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
    """Give each rank its shards, by name: an even part of a stream, rows by number, or the whole.

    Args:
        datasets: Datasets by name.
        config: Which to split, and how Ray Data runs them.
        node_ids: The node of each rank; its length is the world size.
        positions: The data positions that the attempt goes on from.
        exact: The run's exact splits.
        left: The resources that the workers leave, as far as they are counted.
    """
    if config.has_custom_split:
        return _make_custom_shards(datasets, config, node_ids, positions)
    shards: list[dict[str, DatasetShard]] = [{} for _ in node_ids]
    for name, given in datasets.items():
        position = RowPosition.decode(positions.get(make_position_key(name)))
        if config.is_split(name) and not _is_ray_dataset(given):  # a function may give more now
            check_even_rows(name, len(given), len(node_ids), config.uneven_rows)
        if is_map_style(given):
            of_ranks = shard_map_style(name, given, config, len(node_ids), position)
        elif not _is_ray_dataset(given):
            of_ranks = shard_table(name, given, config, len(node_ids), position)
        elif config.is_materialized_split(name):
            of_ranks = _make_materialized_shards(
                name, given, config, len(node_ids), position, materialized
            )
        else:
            of_ranks = shard_stream(
                name, given, config, node_ids, position, remaining_resources or {}
            )
        for by_name, each in zip(shards, of_ranks, strict=True):
            by_name[name] = each
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
            each,
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
        for number, each in enumerate(parts)
    ]


def _make_custom_shards(
    datasets: Mapping[str, Any],
    config: DataConfig,
    node_ids: Sequence[str],
    positions: Mapping[str, Any],
) -> list[dict[str, DatasetShard]]:
    """Give each rank what the user's own subclass gives it."""
    world_size = len(node_ids)
    given = config.configure(
        to_ray_datasets(datasets), world_size, worker_handles=None, worker_node_ids=list(node_ids)
    )
    if len(given) != world_size or not all(isinstance(each, Mapping) for each in given):
        raise TypeError(
            f"{type(config).__name__}.configure() must return a dict of name to DataIterator for "
            f"each of {world_size} workers, found {_describe_value(given)}"
        )
    for name in {name: None for by_name in given for name in by_name}:
        _check_custom_shards(name, config, [_count_iterator_rows(each.get(name)) for each in given])
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
        for rank, by_name in enumerate(given)
    ]


def _check_custom_shards(name: str, config: DataConfig, rows: Sequence[int | None]) -> None:
    """Refuse what a subclass gives of a dataset, as far as its rows are known: none, or uneven.

    Raises:
        ValueError: No rank gets a row, or some get more than others and `uneven_rows` is not
            "keep".
    """
    known = [each for each in rows if each is not None]
    if len(known) < len(rows):
        return
    check_has_rows(name, sum(known), 1)
    if config.is_split(name) and config.uneven_rows != "keep" and len(set(known)) > 1:
        raise ValueError(
            f"{type(config).__name__}.configure() gives {known} rows of datasets[{name!r}] to "
            f"ranks 0 to {len(known) - 1}: workers that wait for each other at each batch could "
            'hang. Give them equally many, or set uneven_rows="keep" for a function that takes '
            "uneven "
            "parts"
        )


def _count_iterator_rows(iterator: object) -> int | None:
    """Count the rows of an iterator over a computed dataset; None where they are unknown."""
    dataset = getattr(iterator, "_base_dataset", None)
    return None if dataset is None else count_rows_or_none(dataset)


def list_streamed_shards(shards: Sequence[Mapping[str, DatasetShard]]) -> list[str]:
    """Name the datasets that ranks read while they are computed, as far as iterators tell."""
    found = {
        name
        for by_name in shards
        for name, each in by_name.items()
        if hasattr(each, "_base_dataset") and _count_iterator_rows(each) is None
    }
    return sorted(found)


def to_ray_datasets(datasets: Mapping[str, object]) -> dict[str, Dataset]:
    """Give tables and items as Ray Data's datasets."""
    return {name: _to_ray_dataset(each) for name, each in datasets.items()}


def _to_ray_dataset(given: Any) -> Dataset:
    import ray.data

    if _is_ray_dataset(given):
        dataset: Dataset = given
    elif is_map_style(given):
        dataset = ray.data.from_torch(given)
    else:
        dataset = ray.data.from_blocks([given])
    return dataset


def materialize_splits(
    datasets: Mapping[str, Any],
    config: DataConfig,
    world_sizes: Sequence[int],
    materialized: MaterializedSplits,
) -> None:
    """Compute what is split exactly, for each size that the group of workers may have.

    Args:
        datasets: Those that `select_materialized` gives, made.
        config: How they are split.
        sizes: Numbers of workers.
        exact: What they become part of.

    Raises:
        ValueError: There is no equal split, and `DataConfig` asks for one.
    """
    for name, given in datasets.items():
        if not _is_ray_dataset(given):
            for size in world_sizes:
                check_even_rows(name, len(given), size, config.uneven_rows)
            continue
        dataset = config.apply_options(name, given)
        for size in world_sizes:
            materialized.get_shards(name, dataset, config, size)


def make_position_key(dataset_name: str) -> str:
    """Give the name under which a dataset's position is in a checkpoint."""
    return f"dataset:{dataset_name}"


def fetch_shards(reference: Any) -> dict[str, DatasetShard]:
    """Give a rank's shards: as they are, or from the object store."""
    if reference is None:
        return {}
    if isinstance(reference, dict):
        return reference
    import ray

    shards: dict[str, DatasetShard] = ray.get(reference)
    return shards
