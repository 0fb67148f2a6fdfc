"""Reproduce Ray Data's local shuffle on row numbers, so that unread rows are known exactly.

Ray Data shuffles a buffer of rows whose order follows from the seed, the batch size, and the number
of rows of each block; the values do not matter. A table of row numbers, cut into blocks of the same
lengths, is therefore shuffled in the same way, at 8 bytes a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drawbar.train._row_positions import LocalShuffle, Segment

if TYPE_CHECKING:
    import pyarrow as pa
    import ray

    from drawbar.train._row_positions import Numbers


def shuffled_rows(
    segments: list[Segment], shuffle: LocalShuffle, rank: int, *, epoch: int
) -> Numbers:
    """Return the row numbers of a rank's blocks in the order of a local shuffle.

    Args:
        segments: Row numbers of each block.
        shuffle: Options of the shuffle.
        rank: Rank that reads the rows.
        epoch: Epoch that they are read in.
    """
    import numpy as np
    import pyarrow as pa
    import ray.data

    if not segments:
        return np.empty(0, dtype=np.int64)
    blocks = [pa.table({"row": np.asarray(rows, dtype=np.int64)}) for rows in segments]
    numbers = ray.data.from_blocks(blocks)
    numbers.context.execution_options.preserve_order = True
    numbers.context.enable_progress_bars = False
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
