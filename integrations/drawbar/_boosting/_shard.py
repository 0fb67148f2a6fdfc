"""A worker's part of a dataset as both libraries take it: blocks of numbers, again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from drawbar._boosting._block import Block, BlockStore
from drawbar._boosting._columns import ColumnRoles
from drawbar._boosting._reader import LabelRange, ShardSummary
from drawbar._boosting._schema import Schema, label_range


class Shard:
    """One rank's rows of one dataset. Each iteration is a new pass over blocks.

    A worker without rows would stop the libraries, so it gives one row that counts nothing: its
    features are missing and its weight is 0. All ranks of that dataset then have weights.

    Args:
        name: Name of the dataset.
        store: The rank's own blocks.
        summaries: Every rank's summary of the dataset.
        rank: This rank.
        schema: What all ranks agreed on.
        columns: Which column plays which role.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        summaries: Sequence[ShardSummary],
        rank: int,
        schema: Schema,
        columns: ColumnRoles,
    ) -> None:
        self.name = name
        self.schema = schema
        self.columns = columns
        self._store = store
        self._summary = summaries[rank]
        self._label = label_range(summaries)
        self._total_rows = sum(summary.rows for summary in summaries)
        self._needs_weights = any(summary.rows == 0 for summary in summaries)

    @property
    def label_range(self) -> LabelRange:
        """The range of the labels of all ranks."""
        return self._label

    @property
    def num_rows(self) -> int:
        """Number of this rank's own rows, 0 if a pass gives one that counts nothing."""
        return self._summary.rows

    @property
    def num_total_rows(self) -> int:
        """Number of rows of all ranks."""
        return self._total_rows

    def __len__(self) -> int:
        """Number of rows that a pass over this shard gives: at least 1."""
        return max(self._summary.rows, 1)

    def __iter__(self) -> Iterator[Block]:
        if not self._summary.rows:
            yield self._placeholder_block()
            return
        for block in self._store:
            translated = self.schema.convert(block, self._summary)
            if self._needs_weights and block.weight is None:
                yield replace(translated, weight=np.ones(len(block), dtype=np.float32))
            else:
                yield translated

    def list_blocks(self) -> list[Block]:
        """Give all blocks at once; if the rows wait on disk, they take no memory there either."""
        if not self._summary.rows or self.schema.matches(self._summary):
            return list(self)
        translated = self._store.new_empty()
        for block in self:
            translated.append(block)
        return list(translated)

    def _placeholder_block(self) -> Block:
        """Give a row that counts nothing."""
        columns = self.columns
        outputs = 1 if len(columns.labels) == 1 else (1, len(columns.labels))
        return Block(
            features=(np.full(1, np.nan, dtype=np.float32),) * len(self.schema.features),
            label=np.full(outputs, self._label.low, dtype=np.float32),
            weight=np.zeros(1, dtype=np.float32),
            group=None if columns.group is None else np.zeros(1, dtype=np.int64),
            base_margin=np.zeros((1, len(columns.base_margins)), dtype=np.float32)
            if columns.base_margins
            else None,
        )
