"""Each worker's share of every batch, so that a batch size means what it means in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drawbar.keras._backend import backend_here
from drawbar.train import get_context

if TYPE_CHECKING:
    from keras.utils import PyDataset


def prepare_dataset(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
) -> Any:
    """Give what `fit` and `evaluate` of this worker take, of data that every worker has as a whole.

    A batch is shared by all workers: with `batch_size=64` each of four gets 16 rows of it, other
    ones. A Ray Data shard is a worker's own part already, and is given to `fit` as it is.

    Args:
        x: Arrays, or a structure of them, with a row per sample; or batches with their targets and
            weights, as a `tf.data.Dataset` or a `torch.utils.data.DataLoader`, which must give the
            same ones on every worker, as all that is seeded by Keras does.
        y: The targets, if `x` is arrays.
        sample_weight: A weight per sample, if `x` is arrays.
        batch_size: Rows of a batch, over all workers; only if `x` is arrays. Default: 32.
        shuffle: Have arrays in another order in each epoch, the same one on all workers.

    Returns:
        A `keras.utils.PyDataset`; of batches, what they were.

    Raises:
        ValueError: The batch size is less than the number of workers, or is given for batches.
        TypeError: `x` is neither.
    """
    context = get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    if not hasattr(x, "element_spec") and not hasattr(x, "collate_fn"):
        return _of_arrays((x, y, sample_weight), batch_size or 32, shuffle, rank, size)
    if y is not None or sample_weight is not None or batch_size is not None or shuffle:
        raise ValueError(
            f"prepare_dataset was given batches, a {type(x).__name__}, which have their targets, "
            "weights, size and order; y, sample_weight, batch_size and shuffle go with arrays"
        )
    if size == 1:
        return x
    if hasattr(x, "element_spec"):
        return _of_tf(x, rank, size)
    return _of_torch(x, rank, size)


def own_rows(rows: Any, rank: int, size: int) -> Any:
    """Take every `size`-th row. JAX needs as many on each worker, so what is left over is not."""
    if backend_here() == "jax":
        rows = rows[: rows.shape[0] // size * size]
    return rows[rank::size]


def _of_arrays(data: Any, batch_size: int, shuffle: bool, rank: int, size: int) -> PyDataset:
    from drawbar.keras._shared_batches import SharedBatches

    if batch_size < size:
        raise ValueError(
            f"prepare_dataset has batch_size={batch_size}, which is less than a row for each of "
            f"{size} workers"
        )
    return SharedBatches(data, batch_size, shuffle=shuffle, rank=rank, size=size)


def _of_tf(batches: Any, rank: int, size: int) -> Any:
    import tensorflow as tf

    def share(*batch: Any) -> Any:
        shared = tf.nest.map_structure(lambda part: _tf_rows(part, rank, size), batch)
        return shared if len(batch) > 1 else shared[0]

    return batches.map(share)


def _tf_rows(rows: Any, rank: int, size: int) -> Any:
    import tensorflow as tf

    if backend_here() == "jax":
        rows = rows[: tf.shape(rows)[0] // size * size]
    return rows[rank::size]


def _of_torch(loader: Any, rank: int, size: int) -> Any:
    from torch.utils.data import DataLoader

    if loader.batch_sampler is None:
        raise TypeError("prepare_dataset needs a DataLoader that makes batches, with a batch_size")
    return DataLoader(
        loader.dataset,
        batch_sampler=_OwnOfEach(loader.batch_sampler, rank, size),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        persistent_workers=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor,
    )


class _OwnOfEach:
    """The indices of this worker, of each batch that a sampler gives."""

    def __init__(self, batches: Any, rank: int, size: int) -> None:
        self._batches = batches
        self._rank = rank
        self._size = size

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            even = len(batch) // self._size * self._size if backend_here() == "jax" else None
            yield batch[:even][self._rank :: self._size]
