"""prepare_dataset: shard each global batch across the workers."""

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
    """Shard data so that batch_size is the global batch size.

    With `batch_size=64` and four workers, each worker gets 16 different rows of every batch.

    Args:
        x: Data that every worker has in full: arrays or a structure of arrays, with one row per
            sample; or batches with targets and weights, as a `keras.utils.PyDataset`, a
            `tf.data.Dataset`, or a `torch.utils.data.DataLoader`. Batches must be the same on every
            worker, which is the case if their order depends only on Keras's seed. Alternatively,
            this worker's shard of a Ray Data dataset. Its columns other than `y` and
            `sample_weight` are the input: one array if there is one column, else a dict.
        y: Targets, if `x` is arrays. For a shard, one column name or several.
        sample_weight: One weight per sample, if `x` is arrays. For a shard, a column name.
        batch_size: Rows of a batch over all workers, for arrays and shards. Default: 32.
        shuffle: Whether to shuffle arrays in each epoch, in the same order on all workers.

    Returns:
        A `keras.utils.PyDataset` for arrays and shards; for batches, an object of their kind.

    Raises:
        ValueError: `batch_size` is less than the number of workers, or, for a shard, not a multiple
            of it; batches are combined with arguments for arrays; `sample_weight` is set without
            `y`; or Keras would split a `tf.data.Dataset` again, because your distribution has
            `auto_shard_dataset=True`.
        TypeError: `x` has another type or an unknown number of rows.

    Example:
        ```python
        def train_func():
            model = prepare_model(make_model())
            train_data = prepare_dataset(x, y, batch_size=64, shuffle=True)
            model.fit(train_data, epochs=3, callbacks=[ReportCheckpointCallback()])
        ```
    """
    context = get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    if hasattr(x, "iter_batches"):
        return _wrap_ray_data_shard(x, y, sample_weight, batch_size or 32, shuffle)
    shard = _sharding_function(x)
    if shard is None:
        if y is None and sample_weight is not None:
            raise ValueError("prepare_dataset(sample_weight=...) needs y. Pass y, too.")
        return _shard_arrays((x, y, sample_weight), batch_size or 32, shuffle, rank, size)
    if y is not None or sample_weight is not None or batch_size is not None or shuffle:
        raise ValueError(
            f"A {type(x).__name__} already defines targets, weights, batch size, and order. "
            "Remove y, sample_weight, batch_size, and shuffle."
        )
    return shard(x, rank, size)


def _sharding_function(batches: Any) -> Callable[[Any, int, int], Any] | None:
    """Return the function that shards these batches; None if the data is not in batches."""
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
            f"prepare_dataset needs data of known length, found {type(data[0]).__name__}. Pass "
            "arrays, a keras.utils.PyDataset, a tf.data.Dataset, a DataLoader, or a Ray Data shard."
        )
    if batch_size < size:
        raise ValueError(
            f"batch_size={batch_size} is less than one row for each of {size} workers. Set at "
            f"least batch_size={size}."
        )
    if current_keras_backend() == "jax" and (num_dropped := batch_size % size):
        add_final_notice(
            f"batch_size={batch_size} is not a multiple of {size} workers, so JAX drops "
            f"{num_dropped} rows of every batch. Set a multiple of {size}."
        )
    batches = ArrayBatches(data, batch_size, shuffle=shuffle, rank=rank, size=size)
    _warn_small_batch(batches.rows % batch_size, size)
    return batches


def _warn_small_batch(rows: int, size: int) -> None:
    """Add a notice if a batch has fewer rows than workers, so that JAX counts rows repeatedly."""
    if current_keras_backend() == "jax" and 0 < rows < size:
        add_final_notice(
            f"A batch has {rows} rows for {size} workers, so with JAX some rows count several "
            "times in gradients and metrics. Drop this batch, or choose a batch_size with which "
            f"the last batch has at least {size} rows."
        )


def _wrap_ray_data_shard(
    shard: Any, y: Any, sample_weight: Any, batch_size: int, shuffle: bool
) -> PyDataset:
    from drawbar.keras._batches import RayDataBatches

    if shuffle:
        raise ValueError(
            "prepare_dataset(shuffle=True) does not support Ray Data shards. Shuffle the dataset "
            "with Dataset.random_shuffle()."
        )
    if batch_size % shard.num_shards:
        raise ValueError(
            f"batch_size={batch_size} is not a multiple of {shard.num_shards} workers. Set a "
            f"multiple of {shard.num_shards}."
        )
    return RayDataBatches(shard, y, sample_weight, batch_size // shard.num_shards)


def _shard_tf_dataset(batches: Any, rank: int, size: int) -> Any:
    import tensorflow as tf

    if size > 1:
        _require_no_second_split()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def shard(*batch: object) -> object:
        sharded = tf.nest.map_structure(lambda part: rank_rows_in_graph(part, rank, size), batch)
        return sharded if len(batch) > 1 else sharded[0]

    return batches.map(shard)


def _require_no_second_split() -> None:
    import keras

    distribution = keras.distribution.distribution()
    if getattr(distribution, "auto_shard_dataset", False):
        raise ValueError(
            f"keras.distribution.{type(distribution).__name__} splits a tf.data.Dataset between "
            "the workers itself, so prepare_dataset() would split it twice. Pass the dataset to "
            "fit() without prepare_dataset(), or create the distribution with "
            "auto_shard_dataset=False. KerasTrainer sets a distribution for JAX by default."
        )


def rank_rows_in_graph(rows: Any, rank: int, size: int) -> Any:
    """Return the same rows as `rank_rows`, in a TensorFlow graph."""
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
            "prepare_dataset needs a DataLoader with a batch_size and a dataset of known length. "
            "An IterableDataset must split its rows between the ranks itself."
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
    """Collate function that also supports batches without rows."""

    def __init__(self, collate: Callable[[Any], Any], dataset: Any) -> None:
        self._collate = collate
        self._dataset = dataset

    def __call__(self, rows: Any) -> Any:
        if len(rows) > 0:
            return self._collate(rows)
        import keras

        example = self._collate([self._dataset[0]])
        return keras.tree.map_structure(lambda part: part[:0], example)


class _RankBatchSampler:
    """Batch sampler that yields this worker's indices of each batch of another sampler.

    The order depends only on the number of the epoch, as for arrays.
    """

    def __init__(self, batches: Any, rank: int, size: int) -> None:
        self._batches = batches
        self._rank = rank
        self._size = size
        self._epoch = -1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; at least one more than before, if `fit` starts again at epoch 0."""
        self._epoch = max(self._epoch + 1, epoch)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        import torch

        from drawbar.keras._batches import rank_rows

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(max(self._epoch, 0))
            batches = list(self._batches)
        for batch in batches:
            _warn_small_batch(len(batch), self._size)
            yield rank_rows(batch, self._rank, self._size)
