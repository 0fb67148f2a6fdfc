"""`SharedBatches`: arrays as batches of which each worker has its rows. Imports Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from drawbar.train.backend import keep_data_position


class SharedBatches(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """This worker's rows of every batch. The order of an epoch follows from its number alone.

    A checkpoint has that number, so a run that goes on has the order that it would have had.
    """

    def __init__(self, data: Any, batch_size: int, *, shuffle: bool, rank: int, size: int) -> None:
        super().__init__()
        parts = keras.tree.map_structure(np.asarray, [each for each in data if each is not None])
        lengths = {len(each) for each in keras.tree.flatten(parts)}
        if len(lengths) != 1:
            raise ValueError(f"the arrays have different numbers of rows: {sorted(lengths)}")
        self._parts = parts
        self._rows = lengths.pop()
        self._batch_size = batch_size
        self._rank = rank
        self._size = size
        self._even = keras.backend.backend() == "jax"
        self._shuffle = shuffle
        self._epoch = 0
        position = keep_data_position("keras_dataset", lambda: self._epoch, numbered=True)
        if position is not None:
            self._epoch = position - 1  # Keras ends an epoch before it begins the first

    def __len__(self) -> int:
        whole, rest = divmod(self._rows, self._batch_size)
        return whole + (rest >= self._size)  # a batch in which a worker has no row is left out

    def __getitem__(self, index: int) -> Any:
        begin = index * self._batch_size
        rows = self._order()[begin : begin + self._batch_size]
        if self._even:
            rows = rows[: len(rows) // self._size * self._size]
        own = rows[self._rank :: self._size]
        batch = keras.tree.map_structure(lambda part: part[own], self._parts)
        return tuple(batch) if len(batch) > 1 else batch[0]

    def on_epoch_end(self) -> None:
        """Go on to the next epoch's order; Keras calls it."""
        self._epoch += 1

    def _order(self) -> Any:
        if not self._shuffle:
            return np.arange(self._rows)
        return np.random.default_rng(self._epoch).permutation(self._rows)
