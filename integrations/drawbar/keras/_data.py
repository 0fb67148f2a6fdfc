"""Each worker's share of every batch, so that a batch size means what it means in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drawbar.keras._backend import current_keras_backend
from drawbar.train import get_context
from drawbar.train.backend import add_final_notice

if TYPE_CHECKING:
    from keras.utils import PyDataset


def prepare_dataset(
    x: object,
    y: object = None,
    sample_weight: object = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
) -> Any:
    """Give what `fit` and `evaluate` of this worker take, so that a batch is one of all workers.

    With `batch_size=64` each of four workers gets 16 rows of every batch, other ones.

    Args:
        x: What every worker has as a whole: arrays, or a structure of them, with a row per sample;
            or batches with their targets and weights, as a `keras.utils.PyDataset`, a
            `tf.data.Dataset` or a `torch.utils.data.DataLoader`, which must give the same ones on
            every worker, as all that is seeded by Keras does. Or this worker's shard of a Ray Data
            dataset, whose columns but for those of `y` and `sample_weight` are the input: an array
            if it is one, else a dict of them.
        y: The targets, if `x` is arrays; of a shard the name of a column, or several.
        sample_weight: A weight per sample, if `x` is arrays; of a shard the name of a column.
        batch_size: Rows of a batch, over all workers; only if `x` is no batches. Default: 32.
        shuffle: Have arrays in another order in each epoch, the same one on all workers.

    Returns:
        A `keras.utils.PyDataset`; of other batches, what they were.

    Raises:
        ValueError: The batch size is less than the number of workers, is not one for each of them
            to have as many rows of, for a shard, or is given for batches; there are weights
            without targets.
        TypeError: `x` is none of these, or nobody knows how many rows it has.
    """
    context = get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    if hasattr(x, "iter_batches"):
        return _wrap_ray_data_shard(x, y, sample_weight, batch_size or 32, shuffle)
    share = _sharding_function(x)
    if share is None:
        if y is None and sample_weight is not None:
            raise ValueError(
                "prepare_dataset was given sample_weight without y, of whose loss it would be the "
                "weight; give y too"
            )
        return _shard_arrays((x, y, sample_weight), batch_size or 32, shuffle, rank, size)
    if y is not None or sample_weight is not None or batch_size is not None or shuffle:
        raise ValueError(
            f"prepare_dataset was given batches, a {type(x).__name__}, which have their targets, "
            "weights, size and order; y, sample_weight, batch_size and shuffle go with arrays"
        )
    return share(x, rank, size)


def _sharding_function(batches: Any) -> Callable[[Any, int, int], Any] | None:
    """Give how such batches are shared; None if they are no batches."""
    if hasattr(batches, "element_spec"):
        return _shard_tf_dataset
    if hasattr(batches, "collate_fn"):
        return _shard_torch_loader
    import keras

    from drawbar.keras._batches import ShardedPyDataset

    return ShardedPyDataset if isinstance(batches, keras.utils.PyDataset) else None


def _shard_arrays(
    data: Sequence[object], batch_size: int, shuffle: bool, rank: int, size: int
) -> PyDataset:
    from drawbar.keras._batches import ArrayBatches

    if not hasattr(data[0], "__len__") and not isinstance(data[0], Mapping):
        raise TypeError(
            f"prepare_dataset was given a {type(data[0]).__name__}, of which nobody knows how many "
            "rows it has; give arrays, a keras.utils.PyDataset, a tf.data.Dataset, a DataLoader or "
            "a Ray Data shard"
        )
    if batch_size < size:
        raise ValueError(
            f"prepare_dataset has batch_size={batch_size}, which is less than a row for each of "
            f"{size} workers"
        )
    if current_keras_backend() == "jax" and (left := batch_size % size):
        add_final_notice(
            f"prepare_dataset has batch_size={batch_size}, of which {size} workers take as many "
            f"rows each with JAX: {left} of every batch are left out; set a multiple of {size}"
        )
    batches = ArrayBatches(data, batch_size, shuffle=shuffle, rank=rank, size=size)
    _warn_small_batch(batches.rows % batch_size, size)
    return batches


def _warn_small_batch(rows: int, size: int) -> None:
    """Say of a batch what JAX makes of it, if it has fewer rows than there are workers."""
    if current_keras_backend() == "jax" and 0 < rows < size:
        add_final_notice(
            f"a batch of prepare_dataset has {rows} of the {size} rows that {size} workers need "
            "with JAX: rows of it count several times in gradients and metrics; leave it out, or "
            "set a batch_size that leaves more"
        )


def _wrap_ray_data_shard(
    shard: Any, y: Any, sample_weight: Any, batch_size: int, shuffle: bool
) -> PyDataset:
    from drawbar.keras._batches import RayDataBatches

    if shuffle:
        raise ValueError(
            "prepare_dataset has shuffle=True for a shard, whose order is that of its dataset; "
            "shuffle that, by Dataset.random_shuffle()"
        )
    if batch_size % shard.num_shards:
        raise ValueError(
            f"prepare_dataset has batch_size={batch_size}, of which {shard.num_shards} workers "
            "cannot have as many rows each of their shards; set a multiple of that"
        )
    return RayDataBatches(shard, y, sample_weight, batch_size // shard.num_shards)


def _shard_tf_dataset(batches: Any, rank: int, size: int) -> Any:
    import tensorflow as tf

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def shard(*batch: object) -> object:
        shared = tf.nest.map_structure(lambda part: rank_rows_in_graph(part, rank, size), batch)
        return shared if len(batch) > 1 else shared[0]

    return batches.map(shard)


def rank_rows_in_graph(rows: Any, rank: int, size: int) -> Any:
    """Do what `own_rows` does, in a graph."""
    import tensorflow as tf

    if current_keras_backend() == "jax":
        number = tf.shape(rows)[0]
        rows = rows[: tf.maximum(number // size * size, tf.minimum(number, size))]
        return rows[rank % number :: size]
    return rows[rank::size]


def _shard_torch_loader(loader: Any, rank: int, size: int) -> Any:
    from torch.utils.data import DataLoader, IterableDataset

    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            "prepare_dataset needs a DataLoader that makes batches, with a batch_size, of a "
            "dataset with a known size; an IterableDataset shares its rows between the ranks itself"
        )
    return DataLoader(
        loader.dataset,
        batch_sampler=_RankBatchSampler(loader.batch_sampler, rank, size),
        num_workers=loader.num_workers,
        collate_fn=_CollateAllowingEmpty(loader.collate_fn, loader.dataset),
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        persistent_workers=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor,
    )


class _CollateAllowingEmpty:
    """Makes a batch of a worker's rows, and of no rows one that has none."""

    def __init__(self, collate: Callable[[Any], Any], dataset: Any) -> None:
        self._collate = collate
        self._dataset = dataset

    def __call__(self, rows: Any) -> Any:
        if len(rows) > 0:
            return self._collate(rows)
        import keras

        some = self._collate([self._dataset[0]])
        return keras.tree.map_structure(lambda part: part[:0], some)


class _RankBatchSampler:
    """The indices of this worker, of each batch that a sampler gives.

    What the sampler draws follows from the number of the epoch alone, as with arrays.
    """

    def __init__(self, batches: Any, rank: int, size: int) -> None:
        self._batches = batches
        self._rank = rank
        self._size = size
        self._epoch = -1

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; one after the last, if `fit` is called again for epoch 0."""
        self._epoch = max(self._epoch + 1, epoch)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        import torch

        from drawbar.keras._batches import rank_rows

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(max(self._epoch, 0))
            drawn = list(self._batches)
        for batch in drawn:
            _warn_small_batch(len(batch), self._size)
            yield rank_rows(batch, self._rank, self._size)
