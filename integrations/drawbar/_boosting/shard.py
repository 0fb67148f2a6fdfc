"""Shard: one rank's rows of a dataset as an iterable of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from drawbar._boosting.block import Block, BlockStore
from drawbar._boosting.columns import ColumnRoles
from drawbar._boosting.reader import LabelRange, ShardSummary
from drawbar._boosting.schema import Schema, label_range


class Shard:
    """One rank's rows of one dataset. Each iteration yields all blocks again.

    The libraries cannot train without rows. A worker without rows therefore yields one row with
    missing features and weight 0, and all ranks of that dataset get weights.

    Args:
        name: Name of the dataset.
        store: Blocks of this rank.
        summaries: Summaries of all ranks for the dataset.
        rank: Rank of this worker.
        schema: Schema that all ranks agreed on.
        columns: Roles of the columns.
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
        """Range of the labels of all ranks."""
        return self._label

    @property
    def num_rows(self) -> int:
        """Number of this rank's rows; 0 if iteration yields only a placeholder."""
        return self._summary.rows

    @property
    def num_total_rows(self) -> int:
        """Number of rows of all ranks."""
        return self._total_rows

    def __len__(self) -> int:
        """Return the number of rows of an iteration, including a placeholder: at least 1."""
        return max(self._summary.rows, 1)

    def __iter__(self) -> Iterator[Block]:
        if not self._summary.rows:
            yield self._placeholder_block()
            return
        for block in self._store:
            converted = self.schema.convert(block, self._summary)
            if self._needs_weights and block.weight is None:
                yield replace(converted, weight=np.ones(len(block), dtype=np.float32))
            else:
                yield converted

    def list_blocks(self) -> list[Block]:
        """Return all blocks. Blocks on disk take no memory in the list either."""
        if not self._summary.rows or self.schema.matches(self._summary):
            return list(self)
        converted = self._store.new_empty()
        for block in self:
            converted.append(block)
        return list(converted)

    def _placeholder_block(self) -> Block:
        """Return one row with weight 0."""
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
