"""Ray Data datasets to one shard per rank. Ray Data is imported only where a dataset is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drawbar.train._config import DataConfig

if TYPE_CHECKING:
    from ray.data import Dataset

    DatasetOrFactory = Dataset | Callable[[], Dataset]


def check_datasets(datasets: Mapping[str, Any] | None, config: DataConfig) -> None:
    """Check the datasets' names and types before anything starts.

    Raises:
        TypeError: Not a mapping of names to Ray datasets or functions that make them.
        ValueError: `DataConfig` names a dataset that was not given.
    """
    if datasets is not None and not isinstance(datasets, Mapping):
        raise TypeError(f"datasets must be a dict of name to ray.data.Dataset, found {datasets!r}")
    for name, dataset in (datasets or {}).items():
        if not callable(dataset) and not hasattr(dataset, "streaming_split"):
            raise TypeError(
                f"datasets[{name!r}] must be a ray.data.Dataset or a function that makes one, "
                f"found {dataset!r}. Make one by ray.data.from_items, from_pandas, read_parquet ..."
            )
    named = set() if config.datasets_to_split == "all" else set(config.datasets_to_split)
    unknown = named - set(datasets or {}) - {"train"}
    if unknown:
        raise ValueError(
            f"DataConfig.datasets_to_split names {sorted(unknown)}, but datasets has "
            f"{sorted(datasets or {})}"
        )


def shard(
    datasets: Mapping[str, Any], config: DataConfig, node_ids: Sequence[str]
) -> list[dict[str, Any]]:
    """Give each rank its iterators, by name: an even streamed split, or the whole.

    Args:
        datasets: Datasets, or functions that make them, by name.
        config: Which to split, and how Ray Data runs them.
        node_ids: The node of each rank; its length is the world size.
    """
    shards: list[dict[str, Any]] = [{} for _ in node_ids]
    for name, given in datasets.items():
        dataset = given() if callable(given) else given
        dataset = _with_options(dataset, _options_for(name, config))
        if config.splits(name) and len(node_ids) > 1:
            hints = list(node_ids) if config.enable_shard_locality else None
            parts = dataset.streaming_split(len(node_ids), equal=True, locality_hints=hints)
        else:
            parts = [dataset.iterator() for _ in node_ids]
        for rank, part in enumerate(parts):
            shards[rank][name] = part
    return shards


def fetch_shards(reference: Any) -> dict[str, Any]:
    """Give a rank's shards: as they are, or from the object store."""
    if reference is None:
        return {}
    if isinstance(reference, dict):
        return reference
    import ray

    shards: dict[str, Any] = ray.get(reference)
    return shards


def _options_for(name: str, config: DataConfig) -> Any:
    options = config.execution_options
    return options.get(name) if isinstance(options, Mapping) else options


def _with_options(dataset: Any, options: Any) -> Any:
    if options is None:
        return dataset
    import copy

    dataset = copy.copy(dataset)
    dataset.context = copy.deepcopy(dataset.context)
    dataset.context.execution_options = copy.deepcopy(options)
    return dataset
