"""Sources of the rows of one rank, which a `DatasetShard` reads.

Each source is a `ray.data.DataIterator`, or has the methods of one that its dataset supports. Rows
of tables and materialized datasets are blocks in Ray's object store. Items of a map-style dataset
are created when they are read, so a restart within an epoch creates only unread items.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from drawbar._data.row_positions import LocalShuffle, Segment

if TYPE_CHECKING:
    import pyarrow as pa
    import ray
    from ray.data import Dataset

    from drawbar._data.row_positions import Numbers


class MaterializedShard:
    """One rank's rows of a materialized dataset: its `ray.data.DataIterator` and its blocks.

    All attributes except `iter_arrow_tables` and `is_in_object_store` belong to the iterator.
    """

    def __init__(self, part: Dataset) -> None:
        import ray

        self._block_refs = get_arrow_blocks(part)
        self._iterator_ref = ray.put(part.iterator())

    @cached_property
    def _iterator(self) -> Any:  # a DataIterator; Ray's own annotation forbids batch_size=None
        """The iterator. Workers that do not use it need not import Ray Data."""
        import ray

        return ray.get(self._iterator_ref)

    @property
    def is_in_object_store(self) -> bool:
        """True if the tables of `iter_arrow_tables` are stored in Ray's object store."""
        return self._block_refs is not None

    def iter_arrow_tables(self) -> Iterator[pa.Table]:
        """Iterate over the rows of a new epoch as Arrow tables.

        Arrow blocks are read directly from the object store, without a copy and without Ray Data,
        whose import and execution would take a worker one or two seconds.
        """
        import ray

        if self._block_refs is None:
            yield from self._iterator.iter_batches(batch_size=None, batch_format="pyarrow")
            return
        for number, block in enumerate(self._block_refs):
            ahead = self._block_refs[number + 1 : number + 2]
            if ahead:
                ray.wait(ahead, timeout=0)  # prefetch while this block is used
            yield ray.get(block)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not set yet while this object is unpickled
            raise AttributeError(name)
        return getattr(self._iterator, name)


class SlicedShard(MaterializedShard):
    """One rank's rows of blocks that are shared with other ranks.

    The tables are views of the blocks. The iterator, if a worker uses it, puts the rows into the
    object store again, which needs no task and no CPU.

    Args:
        slices: Blocks and row ranges: (block, first row, one after the last row).
    """

    def __init__(self, slices: Sequence[tuple[ray.ObjectRef[pa.Table], int, int]]) -> None:
        self._slices = slices

    @cached_property
    def _iterator(self) -> Any:
        return make_dataset(list(self.iter_arrow_tables())).iterator()

    @property
    def is_in_object_store(self) -> bool:
        """True if the tables of `iter_arrow_tables` are stored in Ray's object store."""
        return True

    def iter_arrow_tables(self) -> Iterator[pa.Table]:
        """Iterate over the rows of a new epoch as Arrow tables."""
        import ray

        for block, low, high in self._slices:
            yield ray.get(block).slice(low, high - low)


def make_dataset(tables: list[pa.Table]) -> Dataset:
    """Put tables into the object store as a dataset that keeps their rows in order.

    This needs no task and no CPU.
    """
    import ray.data

    dataset: Dataset = ray.data.from_blocks(tables)
    dataset.context.execution_options.preserve_order = True
    dataset.context.enable_progress_bars = False
    return dataset


def get_arrow_blocks(part: Dataset) -> list[ray.ObjectRef[pa.Table]] | None:
    """Return the blocks of a materialized dataset, None if they are not Arrow tables."""
    import pyarrow as pa

    schema = part.schema()
    is_arrow = schema is not None and isinstance(schema.base_schema, pa.Schema)
    return part.to_arrow_refs() if is_arrow else None


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
        item_indices: Numbers,
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


def permute(numbers: Numbers, seed: int | None) -> Numbers:
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


def shuffled_rows(
    segments: list[Segment], shuffle: LocalShuffle, rank: int, *, epoch: int
) -> Numbers:
    """Return the row numbers of a rank's blocks in the order of Ray Data's local shuffle.

    Ray Data shuffles a buffer of rows. The order follows from the seed, the batch size, and the
    number of rows of each block; the values do not matter. A table of row numbers, cut into blocks
    of the same lengths, is therefore shuffled in the same way, at 8 bytes a row.

    Args:
        segments: Row numbers of each block.
        shuffle: Options of the shuffle.
        rank: Rank that reads the rows.
        epoch: Epoch that they are read in.
    """
    import numpy as np
    import pyarrow as pa

    if not segments:
        return np.empty(0, dtype=np.int64)
    blocks = [pa.table({"row": np.asarray(rows, dtype=np.int64)}) for rows in segments]
    numbers = make_dataset(blocks)
    options = shuffle.make_iterator_options(epoch, rank)
    batches = numbers.iterator().iter_batches(**options, batch_format="numpy")
    return np.concatenate([batch["row"] for batch in batches])


def take_rows(
    blocks: Sequence[ray.ObjectRef[pa.Table]], counts: Sequence[int], numbers: Numbers
) -> pa.Table:
    """Return rows of several blocks as one table, in the order of `numbers`.

    Args:
        blocks: The blocks of a dataset.
        counts: Number of rows of each block.
        numbers: Row numbers in the dataset, at least one.
    """
    import numpy as np
    import ray
    from ray.data.block import BlockAccessor

    ends = np.cumsum(counts)
    block_of_row = np.searchsorted(ends, numbers, side="right")
    builder, positions = None, []
    for number in np.unique(block_of_row):
        in_block = np.flatnonzero(block_of_row == number)
        accessor = BlockAccessor.for_block(ray.get(blocks[number]))
        rows_before = ends[number] - counts[number]
        builder = builder or accessor.builder()
        builder.add_block(accessor.take((numbers[in_block] - rows_before).tolist()))
        positions.append(in_block)
    assert builder is not None
    by_block = BlockAccessor.for_block(builder.build())
    return by_block.take(np.argsort(np.concatenate(positions)).tolist())
