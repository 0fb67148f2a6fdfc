"""Shuffle datasets once before they are split, in the same order in every attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray
    from ray.data import Dataset

SEED = 0
"""Seed of every shuffle: a restart, also in a new driver, splits the rows in the same way."""


def shuffle_numbers(count: int) -> NDArray[np.int64]:
    """Return the numbers from 0 to `count - 1` in shuffled order."""
    import numpy as np

    return np.random.default_rng(SEED).permutation(count)


def shuffle_table(table: pa.Table) -> pa.Table:
    """Return a copy of a table with its rows in shuffled order."""
    # Chunks of a column may have different dictionaries, which take() does not combine.
    return table.unify_dictionaries().take(shuffle_numbers(table.num_rows))


def shuffle_dataset(dataset: Dataset) -> Dataset:
    """Return a Ray Data dataset whose rows are shuffled when it is computed."""
    shuffled: Dataset = dataset.random_shuffle(seed=SEED)
    return shuffled
