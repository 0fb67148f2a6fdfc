"""A worker's part of a dataset as both libraries take it: blocks of numbers, again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from drawbar._boosting._block import Block, Store
from drawbar._boosting._columns import Columns
from drawbar._boosting._read import LabelRange, Summary
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
        store: Store,
        summaries: Sequence[Summary],
        rank: int,
        schema: Schema,
        columns: Columns,
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
    def label(self) -> LabelRange:
        """The range of the labels of all ranks."""
        return self._label

    @property
    def rows(self) -> int:
        """Number of this rank's own rows, 0 if a pass gives one that counts nothing."""
        return self._summary.rows

    @property
    def total_rows(self) -> int:
        """Number of rows of all ranks."""
        return self._total_rows

    def __len__(self) -> int:
        """Number of rows that a pass over this shard gives: at least 1."""
        return max(self._summary.rows, 1)

    def __iter__(self) -> Iterator[Block]:
        if not self._summary.rows:
            yield self._nothing()
            return
        for block in self._store:
            translated = self.schema.translate(block, self._summary)
            if self._needs_weights and block.weight is None:
                yield replace(translated, weight=np.ones(len(block), dtype=np.float32))
            else:
                yield translated

    def blocks(self) -> list[Block]:
        """Give all blocks at once; if the rows wait on disk, they take no memory there either."""
        if not self._summary.rows or self.schema.is_that_of(self._summary):
            return list(self)
        translated = self._store.empty()
        for block in self:
            translated.append(block)
        return list(translated)

    def _nothing(self) -> Block:
        """Give a row that counts nothing."""
        columns = self.columns
        outputs = 1 if len(columns.labels) == 1 else (1, len(columns.labels))
        return Block(
            features=(np.full(1, np.nan, dtype=np.float32),) * len(self.schema.features),
            label=np.full(outputs, self._label.low, dtype=np.float32),
            weight=np.zeros(1, dtype=np.float32),
            group=None if columns.group is None else np.zeros(1, dtype=np.int64),
            base_margin=np.zeros((1, len(columns.margins)), dtype=np.float32)
            if columns.margins
            else None,
        )
