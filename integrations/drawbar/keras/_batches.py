"""Keras datasets that yield this worker's rows and can start mid-epoch. Imports Keras."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import keras
import numpy as np

from drawbar.train.backend import register_data_position, register_read_ahead

NUM_PEEKED_BATCHES = 2
"""Maximum number of batches that Keras reads before the first epoch to find out shapes."""


class ResumableBatches(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """Sequence of batches that can skip the first batches of an epoch.

    The first epoch after a resume may be shorter than later ones: Keras requests the length when
    `fit` starts and again in each epoch.
    """

    _num_batches_total: int
    _num_skipped = 0

    def skip_batches(self, batches: int) -> None:
        """Skip the first batches of the next epoch."""
        self._num_skipped = batches

    def __len__(self) -> int:
        return self._num_batches_total - self._num_skipped


class ArrayBatches(ResumableBatches):
    """This worker's rows of every batch. The order depends only on the number of the epoch.

    Checkpoints store this number, so that a resumed run continues with the same order.
    """

    def __init__(
        self, data: Iterable[object], batch_size: int, *, shuffle: bool, rank: int, size: int
    ) -> None:
        super().__init__()
        parts = [_to_arrays(part) for part in data if part is not None]
        if keras.backend.backend() == "tensorflow":
            parts = keras.tree.lists_to_tuples(parts)  # tf.data converts a list to one tensor
        lengths = {len(array) for array in keras.tree.flatten(parts)}
        if len(lengths) != 1:
            raise ValueError(
                f"All arrays must have the same number of rows, found {sorted(lengths)}."
            )
        self.arrays = parts
        self.rows = lengths.pop()
        self.batch_size = batch_size
        self._num_batches_total = -(-self.rows // batch_size)
        self.rank = rank
        self.size = size
        self._shuffle = shuffle
        self._epoch = 0
        self._cached_order: tuple[int, Any] = (-1, None)
        position = register_data_position("keras_dataset", lambda: self._epoch, add_index=True)
        if position is not None:
            self._epoch = position - 1  # Keras calls on_epoch_end once before the first epoch

    def __getitem__(self, index: int) -> object:
        begin = (index + self._num_skipped) * self.batch_size
        rows = self.epoch_order()[begin : begin + self.batch_size]
        return self._take_rows(rank_rows(rows, self.rank, self.size))

    def rank_slice(self) -> tuple[object, int]:
        """Return this worker's part of all rows, in their original order, and its length.

        Keras cannot compute a batch without rows. If the part is empty, row 0 is returned with
        length 0.
        """
        begin, end = (self.rows * rank // self.size for rank in (self.rank, self.rank + 1))
        return self._take_rows(range(begin, end) if end > begin else range(1)), end - begin

    def on_epoch_end(self) -> None:
        """Switch to the order of the next epoch. Called by Keras."""
        self._epoch += 1

    def epoch_order(self) -> Any:
        """Return the rows in the order of this epoch."""
        if not self._shuffle:
            return range(self.rows)
        epoch, order = self._cached_order
        if epoch != self._epoch:
            order = np.random.default_rng(self._epoch).permutation(self.rows)
            self._cached_order = (self._epoch, order)
        return order

    def _take_rows(self, rows: Any) -> Any:
        if isinstance(rows, range):  # a slice avoids a copy
            rows = slice(rows.start, rows.stop, rows.step)
        batch = keras.tree.map_structure(lambda part: part[rows], self.arrays)
        return tuple(batch) if len(batch) > 1 else batch[0]


def _to_arrays(data: Any) -> Any:
    """Convert leaves of a structure to arrays. A list of numbers becomes one array."""
    if isinstance(data, Mapping):
        return {name: _to_arrays(value) for name, value in data.items()}
    has_arrays = any(hasattr(leaf, "shape") for leaf in keras.tree.flatten(data))
    if isinstance(data, list | tuple) and has_arrays:
        arrays = [_to_arrays(item) for item in data]
        return tuple(arrays) if isinstance(data, tuple) else arrays
    return np.asarray(data)


class ShardedPyDataset(ResumableBatches):
    """This worker's rows of the batches of a `PyDataset` that every worker has."""

    def __init__(self, source: Any, rank: int, size: int) -> None:
        super().__init__(source.workers, source.use_multiprocessing, source.max_queue_size)
        self._source = source
        self._num_batches_total = source.num_batches or 0
        self._rank = rank
        self._size = size

    @property
    def num_batches(self) -> int | None:
        """Number of batches; None if it is infinite."""
        return None if self._source.num_batches is None else len(self)

    def __getitem__(self, index: int) -> object:
        def shard(part: Any) -> Any:
            return None if part is None else rank_rows(np.asarray(part), self._rank, self._size)

        return keras.tree.map_structure(shard, self._source[index + self._num_skipped])

    def on_epoch_begin(self) -> None:
        """Start an epoch of the source. Called by Keras."""
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """End an epoch of the source. Called by Keras."""
        self._source.on_epoch_end()


def rank_rows(rows: Any, rank: int, size: int) -> Any:
    """Return this worker's rows of a batch: every `size`-th row, beginning with row `rank`.

    If a batch has fewer rows than workers, some workers get no rows. With JAX, each worker must get
    the same number of rows, at least one. So the remaining rows of a batch are dropped, and if it
    has fewer rows than workers, some workers use the same row.
    """
    if keras.backend.backend() == "jax":
        number = len(rows)
        rows, rank = rows[: max(number // size * size, min(number, size))], rank % number
    return rows[rank::size]


class SequentialBatches(ResumableBatches):
    """Batches that can only be read in order, for example of a `tf.data.Dataset`."""

    def __init__(self, source: Iterable[object], number: int) -> None:
        super().__init__()
        self._source = source
        self._num_batches_total = number
        self._iterator: Iterator[object] = iter(())

    def __getitem__(self, index: int) -> object:
        if index == 0:
            self._iterator = islice(iter(self._source), self._num_skipped, None)
        return keras.tree.map_structure(np.asarray, next(self._iterator))


class RayDataBatches(ResumableBatches):
    """Batches of a Ray Data shard, which tracks its own position.

    Batches that Keras reads before the first epoch are kept, because a shard can be read only once
    per epoch. A checkpoint has the position after the batches that are trained: Keras reads others
    ahead.
    """

    def __init__(
        self, shard: Any, y: str | Sequence[str] | None, sample_weight: str | None, batch_size: int
    ) -> None:
        super().__init__()
        self._batches = shard.iter_batches(batch_size=batch_size)
        self._num_batches_total = len(self._batches)
        read = sum(workers * rows for workers, rows in shard.encode_position()["read"])
        remaining = len(shard) - read // shard.num_shards
        self._num_consumed = self._num_batches_total - -(-remaining // batch_size)
        self._y = y
        self._sample_weight = sample_weight
        self._iterator: Iterator[dict[str, object]] = iter(())
        self._peeked: list[object] = []
        self._is_training = False
        self._has_begun_epoch = False
        self._num_trained = 0
        # Positions before a batch was read, by its index, if it is not trained yet.
        self._previous_positions: dict[int, dict[str, object]] = {}
        self._get_positions = register_read_ahead(
            lambda: self._previous_positions.get(self._num_trained, {})
        )

    @contextmanager
    def training(self) -> Iterator[None]:
        """Save the position after the trained batches, which `set_num_trained` counts."""
        self._is_training, self._has_begun_epoch = True, False
        try:
            yield
        finally:
            self._is_training = False

    def set_num_trained(self, number: int) -> None:
        """Record how many batches of this epoch are trained. Call it when an epoch begins, too."""
        self._has_begun_epoch = True
        self._num_trained = number
        for index in [index for index in self._previous_positions if index < number]:
            del self._previous_positions[index]

    def skip_batches(self, batches: int) -> None:
        """Skip the batches that the shard has consumed, or no batches if `batches` is 0.

        The position of the shard determines the number, so other values of `batches` are ignored.
        """
        super().skip_batches(self._num_consumed if batches else 0)

    def __getitem__(self, index: int) -> object:
        is_peeking = self._is_training and not self._has_begun_epoch
        if index < len(self._peeked):
            batch = self._peeked[index]
        else:
            if index == 0:
                self._iterator = iter(self._batches)
                self._num_trained, self._previous_positions = 0, {}
            try:
                batch = self._read(index)
            except StopIteration:
                if is_peeking and self._peeked:  # Keras needs only shapes
                    return self._peeked[-1]
                raise
            self._peeked = [*self._peeked, batch] if index < NUM_PEEKED_BATCHES else []
        if index == len(self) - 1 and not is_peeking:
            self._peeked = []
            next(self._iterator, None)  # so that the shard records the end of the epoch
        return batch

    def _read(self, index: int) -> object:
        if not self._is_training:
            return self._to_keras_batch(next(self._iterator))
        before = self._get_positions()
        columns = next(self._iterator)
        self._previous_positions[index] = {
            name: before.get(name)
            for name, position in self._get_positions().items()
            if position != before.get(name)
        }
        return self._to_keras_batch(columns)

    def _to_keras_batch(self, columns: dict[str, object]) -> object:
        columns = dict(columns)
        batch = [_pop_columns(columns, self._y), _pop_columns(columns, self._sample_weight)]
        x = columns if len(columns) > 1 else next(iter(columns.values()))
        parts = [x, *(part for part in batch if part is not None)]
        return tuple(parts) if len(parts) > 1 else parts[0]


def _pop_columns(columns: dict[str, object], names: str | Sequence[str] | None) -> object:
    if names is None or isinstance(names, str):
        return None if names is None else _pop_column(columns, names)
    return {name: _pop_column(columns, name) for name in names}


def _pop_column(columns: dict[str, object], name: str) -> object:
    if name not in columns:
        raise KeyError(
            f"The shard has no column {name!r}. Its columns are {', '.join(map(repr, columns))}."
        )
    return columns.pop(name)
