"""Shard PyTorch map-style datasets by item number.

The dataset is stored in Ray's object store once per node. Each rank has the numbers of its items
and creates them when it reads them, so a restart within an epoch creates only unread items.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

from drawbar.train._config.data_config import DataConfig
from drawbar.train._data.shard import DatasetShard, ShardSpec
from drawbar.train._data.shuffling import shuffle_numbers
from drawbar.train._row_positions import (
    LocalShuffle,
    NumberedRows,
    RowPosition,
    Segment,
    split_rows,
)

if TYPE_CHECKING:
    import numpy as np
    import ray
    from numpy.typing import NDArray

    ItemIndices = NDArray[np.int64]


def is_map_style(value: object) -> bool:
    """Return whether a value is a PyTorch map-style dataset, without importing PyTorch."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(value).__mro__}
    has_items = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return has_items and "torch.utils.data.dataset.Dataset" in names


class MapStyleDataset(Protocol):
    """A PyTorch dataset with numbered items."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> object: ...


class MapStyleShard:
    """One rank's items of a dataset.

    Args:
        dataset_or_ref: The dataset, or a reference to it in the object store.
        item_indices: Indices of the items, in reading order.
    """

    def __init__(
        self,
        dataset_or_ref: MapStyleDataset | ray.ObjectRef[MapStyleDataset],
        item_indices: ItemIndices,
    ) -> None:
        self._dataset_or_ref = dataset_or_ref
        self._item_indices = item_indices

    @cached_property
    def _dataset(self) -> MapStyleDataset:
        import ray

        source = self._dataset_or_ref
        return ray.get(source) if isinstance(source, ray.ObjectRef) else source

    def count(self) -> int:
        """Return the number of items."""
        return len(self._item_indices)

    def iter_rows(self) -> Iterator[object]:
        """Iterate over the items as the dataset returns them."""
        return (self._dataset[int(index)] for index in self._item_indices)

    def iter_torch_batches(
        self,
        *,
        batch_size: int = 256,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: object = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        prefetch_batches: int = 1,
    ) -> Iterator[Any]:
        """Iterate over batches as `torch.utils.data.DataLoader` creates them.

        Args:
            batch_size: Number of items in a batch.
            collate_fn: Function that creates a batch from a list of items. Default: that from
                PyTorch.
            device: Device to which tensors are moved. Default: none.
            drop_last: Whether to leave out a smaller last batch.
            local_shuffle_buffer_size: If set, to any size, all items of this rank are shuffled.
            local_shuffle_seed: Seed of the shuffle.
            prefetch_batches: Accepted for compatibility with Ray Data and ignored.
        """
        dataset = self._dataset
        if collate_fn is None:  # Unpickling a PyTorch dataset has imported PyTorch.
            collate_fn = sys.modules["torch.utils.data"].default_collate
        numbers = self._item_indices
        if local_shuffle_buffer_size:
            numbers = permute(numbers, local_shuffle_seed)
        for start in range(0, len(numbers), batch_size):
            items = [dataset[int(number)] for number in numbers[start : start + batch_size]]
            if drop_last and len(items) < batch_size:
                return
            batch = collate_fn(items)
            yield batch if device is None else _move_to_device(batch, device)

    def iter_batches(self, *, batch_size: int = 256, **options: Any) -> Iterator[Any]:
        """Iterate over the batches of `iter_torch_batches` as NumPy arrays."""
        return map(_to_numpy, self.iter_torch_batches(batch_size=batch_size, **options))


def permute(numbers: ItemIndices, seed: int | None) -> ItemIndices:
    """Return numbers in an order that depends on the seed."""
    import numpy as np

    return np.random.default_rng(seed).permutation(numbers)


def _move_to_device(batch: object, device: object) -> object:
    return _map_leaves(batch, lambda value: value.to(device) if hasattr(value, "to") else value)


def _to_numpy(batch: object) -> object:
    return _map_leaves(batch, lambda value: value.numpy() if hasattr(value, "numpy") else value)


def _map_leaves(batch: object, change: Callable[[Any], object]) -> object:
    if isinstance(batch, Mapping):
        return {name: _map_leaves(value, change) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_map_leaves(value, change) for value in batch]
    return change(batch)


def shard_map_style(
    name: str, dataset: MapStyleDataset, config: DataConfig, world_size: int, position: RowPosition
) -> list[DatasetShard]:
    """Return the shard of a dataset for each rank: consecutive items, or all if it is not split.

    Raises:
        ValueError: `DataConfig.group_column` is set, but items have no columns.
    """
    import numpy as np
    import ray

    if config.is_split(name) and config.group_column is not None:
        raise ValueError(
            f"DataConfig.group_column={config.group_column!r} needs a dataset with columns, but "
            f"datasets[{name!r}] is a PyTorch dataset ({type(dataset).__name__}), which has none"
        )
    num_shards = world_size if config.is_split(name) else 1
    num_items = len(dataset)
    items = shuffle_numbers(num_items) if config.shuffles(name) else np.arange(num_items)
    dataset_or_ref = ray.put(dataset) if ray.is_initialized() else dataset
    parts = [items[low:high] for low, high in split_rows(num_items, num_shards, config.uneven_rows)]
    order = partial(_apply_shuffle, epoch=position.epoch)
    unread = NumberedRows([num_items], config.uneven_rows, order).split_unread(
        position.rows_read, num_shards
    )
    return [
        DatasetShard(
            MapStyleShard(dataset_or_ref, parts[number]),
            ShardSpec(
                dataset=name,
                shard_index=number,
                num_shards=num_shards,
                num_rows=len(parts[number]),
                total_rows=num_items,
                uneven_rows=config.uneven_rows,
            ),
            position=position,
            unread_source=MapStyleShard(dataset_or_ref, items[_numbers(unread[number])])
            if position.rows_read
            else None,
        )
        for number in (range(num_shards) if num_shards == world_size else [0] * world_size)
    ]


def _numbers(segments: list[Segment]) -> ItemIndices:
    import numpy as np

    return np.concatenate([np.empty(0, dtype=np.int64), *segments])


def _apply_shuffle(
    segments: list[Segment], shuffle: LocalShuffle, rank: int, *, epoch: int
) -> ItemIndices:
    return permute(_numbers(segments), shuffle.compute_seed(epoch, rank))
