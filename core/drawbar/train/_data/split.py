"""Ray Data datasets to one shard per rank. Ray Data is imported only where a dataset is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drawbar.train._data.exact_split import ExactSplits
from drawbar.train._data.shard import DatasetShard, Read, RowPosition
from drawbar.train._settings.checks import warn_caller
from drawbar.train._settings.data_config import TRAIN_DATASET_KEY, DataConfig, with_options
from drawbar.train._threads import DaemonThreads

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset

    DatasetOrFactory = Dataset | Callable[[], Dataset]

STREAM_END_SECONDS = 0.5


def check_datasets(datasets: Mapping[str, object] | None, config: DataConfig) -> None:
    """Check the datasets' names and types before anything starts.

    Warns of a name in `DataConfig` that no dataset has.

    Raises:
        TypeError: Not a mapping of names to Ray datasets or functions that make them.
    """
    if datasets is not None and not isinstance(datasets, Mapping):
        raise TypeError(
            "datasets must be a dict of name to ray.data.Dataset, such as "
            f"{{'{TRAIN_DATASET_KEY}': ray.data.from_pandas(frame)}}, found {_kind(datasets)}"
        )
    for name, dataset in (datasets or {}).items():
        if not callable(dataset) and not hasattr(dataset, "streaming_split"):
            raise TypeError(
                f"datasets[{name!r}] must be a ray.data.Dataset or a function that makes one, "
                f"found {_kind(dataset)}. Make one by ray.data.from_items, from_pandas, "
                "read_parquet ..."
            )
    named = set() if config.datasets_to_split == "all" else set(config.datasets_to_split)
    unknown = named - set(datasets or {}) - {TRAIN_DATASET_KEY}
    if unknown:
        warn_caller(
            f"DataConfig.datasets_to_split names {sorted(unknown)}, but datasets has "
            f"{sorted(datasets or {})}: those that it does not name are whole on each worker"
        )


def _kind(value: object) -> str:
    """Say what a value is: in short, as a table may be long."""
    short = repr(value)
    if len(short) <= 80 and "\n" not in short:
        return short
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def make(datasets: Mapping[str, DatasetOrFactory]) -> dict[str, Dataset]:
    """Call the functions that make datasets."""
    return {name: each() if callable(each) else each for name, each in datasets.items()}


def lazy(datasets: Mapping[str, DatasetOrFactory], config: DataConfig) -> list[str]:
    """Name the datasets that Ray Data computes as they are read; of those that are made already."""
    made = {
        name: each
        for name, each in datasets.items()
        if not callable(each) and not config.splits_exactly(name)
    }
    if not made:
        return []
    from ray.data.dataset import MaterializedDataset

    return [name for name, each in made.items() if not isinstance(each, MaterializedDataset)]


def shard(
    datasets: Mapping[str, Dataset],
    config: DataConfig,
    node_ids: Sequence[str],
    positions: Mapping[str, Any],
    exact: ExactSplits,
) -> list[dict[str, DatasetShard]]:
    """Give each rank its shards, by name: an even streamed split, an exact one, or the whole.

    A dataset whose recorded position is inside an epoch is read once here, to find what is left.

    Args:
        datasets: Datasets by name.
        config: Which to split, and how Ray Data runs them.
        node_ids: The node of each rank; its length is the world size.
        positions: The data positions that the attempt goes on from.
        exact: The run's exact splits.
    """
    if config.is_configured:
        return _configured(datasets, config, node_ids, positions)
    shards: list[dict[str, DatasetShard]] = [{} for _ in node_ids]
    for name, given in datasets.items():
        if config.splits_exactly(name):
            exact_parts = exact.parts(name, given, config, len(node_ids))
            epoch = _epoch(positions, name)
            for shards_of_rank, each in zip(shards, exact_parts, strict=True):
                shards_of_rank[name] = DatasetShard(
                    each, world_size=len(node_ids), position=epoch, ordered=False
                )
            continue
        dataset = config.with_options(name, given)
        ordered = dataset.context.execution_options.preserve_order
        world_size = len(node_ids) if config.splits(name) else 1
        hints = list(node_ids) if config.enable_shard_locality else None
        position = RowPosition.decode(positions.get(position_name(name)))
        if not ordered:
            position = _epoch(positions, name)
        rest, owners = _rest(dataset, position.read, world_size)
        parts = _split(dataset, world_size, hints)
        rows = _rows(given, world_size)
        for rank, shards_of_rank in enumerate(shards):
            part = rank if world_size > 1 else 0
            shards_of_rank[name] = DatasetShard(
                parts[part],
                world_size=world_size,
                position=position,
                rest=rest[part] if rest else None,
                rows=rows,
                ordered=ordered,
                owners=owners,
            )
    return shards


def _configured(
    datasets: Mapping[str, Dataset],
    config: DataConfig,
    node_ids: Sequence[str],
    positions: Mapping[str, Any],
) -> list[dict[str, DatasetShard]]:
    """Give each rank what the user's own subclass gives it."""
    world_size = len(node_ids)
    given = config.configure(
        datasets, world_size, worker_handles=None, worker_node_ids=list(node_ids)
    )
    if len(given) != world_size or not all(isinstance(each, Mapping) for each in given):
        raise TypeError(
            f"{type(config).__name__}.configure() must return a dict of name to DataIterator for "
            f"each of {world_size} workers, found {_kind(given)}"
        )
    return [
        {
            name: DatasetShard(
                part,
                world_size=world_size if config.splits(name) else 1,
                position=_epoch(positions, name),
                ordered=False,
            )
            for name, part in by_name.items()
        }
        for by_name in given
    ]


def _epoch(positions: Mapping[str, Any], name: str) -> RowPosition:
    """Give the position before the epoch that was interrupted."""
    return RowPosition(RowPosition.decode(positions.get(position_name(name))).epoch)


def split_exactly(
    datasets: Mapping[str, DatasetOrFactory],
    config: DataConfig,
    sizes: Sequence[int],
    exact: ExactSplits,
) -> None:
    """Compute what is split exactly, for each size that the group of workers may have."""
    chosen = {name: each for name, each in datasets.items() if config.splits_exactly(name)}
    for name, given in make(chosen).items():
        dataset = config.with_options(name, given)
        for size in sizes:
            exact.parts(name, dataset, config, size)


def _rows(dataset: Dataset, world_size: int) -> int | None:
    """Say how many rows each part has, unless the dataset would have to be computed for that."""
    from ray.data.dataset import MaterializedDataset

    return dataset.count() // world_size if isinstance(dataset, MaterializedDataset) else None


def position_name(dataset_name: str) -> str:
    """Give the name under which a dataset's position is in a checkpoint."""
    return f"dataset:{dataset_name}"


def _split(dataset: Dataset, world_size: int, hints: list[str] | None = None) -> list[DataIterator]:
    """Give the parts of a dataset, equally long."""
    if world_size == 1:
        return [dataset.iterator()]
    parts: list[DataIterator] = dataset.streaming_split(
        world_size, equal=True, locality_hints=hints
    )
    return parts


def _rest(dataset: Dataset, read: Read, world_size: int) -> tuple[list[DataIterator], list[object]]:
    """Give the parts of what has not been read of a dataset, and what must live meanwhile.

    Where the last readers were as many as there are now, each goes on with its own part.
    """
    if not read:
        return [], []
    owners: list[object] = []
    for readers, rows in read:
        parts = _split(dataset, readers)
        owners.append(parts)  # whose actor owns the rows
        with DaemonThreads(readers, "drawbar-split") as pool:  # all are read at the same time
            tables = list(pool.map(lambda part: part.materialize(), parts))
        left = [table.split_at_indices([rows])[1] for table in tables]
        dataset = with_options(left[0].union(*left[1:]) if len(left) > 1 else left[0], None)
    if readers == world_size:
        return [each.iterator() for each in left], owners
    return _split(dataset, world_size), owners


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


def fetch_shards(reference: Any) -> dict[str, DatasetShard]:
    """Give a rank's shards: as they are, or from the object store."""
    if reference is None:
        return {}
    if isinstance(reference, dict):
        return reference
    import ray

    shards: dict[str, DatasetShard] = ray.get(reference)
    return shards
