"""PyTorch's map-style datasets: items by number, made by the rank that reads them.

The dataset itself lies in Ray's object store, once per node; each rank has the numbers of its
items. A restart inside an epoch makes no item again that was read.
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


def is_map_style(given: object) -> bool:
    """Whether something is a map-style dataset of PyTorch's; does not import it."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(given).__mro__}
    has_items = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    return has_items and "torch.utils.data.dataset.Dataset" in kinds


class MapStyleDataset(Protocol):
    """A dataset of PyTorch's whose items have numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> object: ...


class MapStyleShard:
    """One rank's items of a dataset.

    Args:
        kept: The dataset, or a reference to it in the object store.
        numbers: Those of the items, in order.
    """

    def __init__(
        self,
        dataset_or_ref: MapStyleDataset | ray.ObjectRef[MapStyleDataset],
        item_indices: ItemIndices,
    ) -> None:
        self._kept = dataset_or_ref
        self._numbers = item_indices

    @cached_property
    def _dataset(self) -> MapStyleDataset:
        import ray

        return ray.get(self._kept) if isinstance(self._kept, ray.ObjectRef) else self._kept

    def count(self) -> int:
        """Count the items."""
        return len(self._numbers)

    def iter_rows(self) -> Iterator[object]:
        """Give the items as the dataset has them."""
        return (self._dataset[int(number)] for number in self._numbers)

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
        """Give batches as a `torch.utils.data.DataLoader` makes them.

        Args:
            batch_size: Items of a batch.
            collate_fn: Makes a batch of a list of items. Default: PyTorch's own.
            device: Where tensors go. Default: they stay.
            drop_last: Leave out a last batch that is smaller.
            local_shuffle_buffer_size: Of any size: all items of this rank are shuffled.
            local_shuffle_seed: Of the shuffle.
            prefetch_batches: Ray Data's; nothing is fetched ahead.
        """
        dataset = self._dataset
        if collate_fn is None:  # who has fetched a dataset of PyTorch's has imported it by that
            collate_fn = sys.modules["torch.utils.data"].default_collate
        numbers = self._numbers
        if local_shuffle_buffer_size:
            numbers = permute(numbers, local_shuffle_seed)
        for start in range(0, len(numbers), batch_size):
            items = [dataset[int(number)] for number in numbers[start : start + batch_size]]
            if drop_last and len(items) < batch_size:
                return
            batch = collate_fn(items)
            yield batch if device is None else _move_to_device(batch, device)

    def iter_batches(self, *, batch_size: int = 256, **options: Any) -> Iterator[Any]:
        """Give the batches of `iter_torch_batches` with NumPy's arrays in place of tensors."""
        return map(_to_numpy, self.iter_torch_batches(batch_size=batch_size, **options))


def permute(numbers: ItemIndices, seed: int | None) -> ItemIndices:
    """Give numbers in another order, which follows from the seed."""
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
            f"DataConfig.group_column={config.group_column!r} needs columns, and "
            f"datasets[{name!r}] is a {type(dataset).__name__}, which has items"
        )
    of = world_size if config.is_split(name) else 1
    items = shuffle_numbers(len(dataset)) if config.shuffles(name) else np.arange(len(dataset))
    kept = ray.put(dataset) if ray.is_initialized() else dataset
    parts = [items[low:high] for low, high in split_rows(len(dataset), of, config.uneven_rows)]
    order = partial(_apply_shuffle, epoch=position.epoch)
    rest = NumberedRows([len(dataset)], config.uneven_rows, order).split_unread(
        position.rows_read, of
    )
    return [
        DatasetShard(
            MapStyleShard(kept, parts[number]),
            ShardSpec(
                dataset=name,
                shard_index=number,
                num_shards=of,
                num_rows=len(parts[number]),
                total_rows=len(dataset),
                uneven_rows=config.uneven_rows,
            ),
            position=position,
            unread_source=MapStyleShard(kept, items[_numbers(rest[number])])
            if position.rows_read
            else None,
        )
        for number in (range(of) if of == world_size else [0] * world_size)
    ]


def _numbers(segments: list[Segment]) -> ItemIndices:
    import numpy as np

    return np.concatenate([np.empty(0, dtype=np.int64), *segments])


def _apply_shuffle(
    segments: list[Segment], shuffle: LocalShuffle, rank: int, *, epoch: int
) -> ItemIndices:
    return permute(_numbers(segments), shuffle.compute_seed(epoch, rank))
