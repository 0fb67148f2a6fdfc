"""Compute shards, positions, and unread rows of a dataset from row numbers.

All ranks read the same number of rows of their shards. Therefore, the entry "each of 2 workers has
read 500 rows" identifies the unread rows: split the dataset again and skip 500 rows of each shard.
A position consists of these entries, one for each world size in the epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from drawbar._records.events import UnevenRows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

RowRanges = tuple[tuple[int, int], ...]
"""Rows as (first, one after the last)."""

Segment: TypeAlias = "range | Numbers"
"""Row numbers of one block, in the order in which they are read: a `range`, or an array."""

SEGMENT_ROWS = 65_536
"""Maximum length of a segment that is an array."""

T = TypeVar("T")


@dataclass(frozen=True)
class LocalShuffle:
    """A reproducible shuffle of a rank's rows.

    Args:
        buffer_size: `local_shuffle_buffer_size` of the iteration.
        batch_size: Number of rows of a batch, which also affects the order.
        seed: Seed that the user set, from which the seed of each epoch and rank is derived.
    """

    buffer_size: int
    batch_size: int
    seed: int

    def compute_seed(self, epoch: int, rank: int) -> int:
        """Return the seed of one rank's shuffle in one epoch."""
        import numpy as np

        return int(np.random.SeedSequence([self.seed, epoch, rank]).generate_state(1)[0])

    def make_iterator_options(self, epoch: int, rank: int) -> dict[str, int]:
        """Return Ray Data's arguments for one rank's shuffle in one epoch."""
        return {
            "batch_size": self.batch_size,
            "local_shuffle_buffer_size": self.buffer_size,
            "local_shuffle_seed": self.compute_seed(epoch, rank),
        }


@dataclass(frozen=True)
class RowsRead:
    """Rows that each of a number of workers has read, possibly in shuffled order."""

    num_workers: int
    rows_per_worker: int
    shuffle: LocalShuffle | None = None

    def encode(self) -> list[object]:
        """Return the entry as plain values for JSON."""
        shuffled = [] if self.shuffle is None else [asdict(self.shuffle)]
        return [self.num_workers, self.rows_per_worker, *shuffled]

    @staticmethod
    def decode(workers: int, rows: int, shuffle: Mapping[str, int] | None = None) -> RowsRead:
        """Decode the result of `encode`."""
        return RowsRead(workers, rows, None if shuffle is None else LocalShuffle(**shuffle))


@dataclass(frozen=True)
class RowPosition:
    """Position in a dataset: completed epochs, and the rows read of the current epoch.

    Attributes:
        epoch: Number of the current epoch.
        rows_read: Rows of the current epoch that were read.
        num_incomplete_epochs: Number of earlier epochs that were left early. Ray Data, which
            reshuffles files for each execution, does not count them.
        discarded: Rows that were read of this epoch before it restarted from its beginning, one
            entry for each of its restarts.
    """

    epoch: int = 0
    rows_read: tuple[RowsRead, ...] = ()
    num_incomplete_epochs: int = 0
    discarded: tuple[tuple[RowsRead, ...], ...] = ()

    @staticmethod
    def decode(recorded: Mapping[str, Any] | None) -> RowPosition:
        """Decode the result of `encode`; None is the beginning of the first epoch."""
        if recorded is None:
            return RowPosition()
        discarded = tuple(decode_reads(reads) for reads in recorded.get("discarded", ()))
        return RowPosition(
            recorded["epoch"],
            decode_reads(recorded["read"]),
            recorded.get("cut_short", 0),
            discarded,
        )

    def encode(self) -> dict[str, Any]:
        """Return the position as plain values for JSON."""
        encoded: dict[str, Any] = {"epoch": self.epoch, "read": encode_reads(self.rows_read)}
        if self.num_incomplete_epochs:
            encoded["cut_short"] = self.num_incomplete_epochs
        if self.discarded:
            encoded["discarded"] = [encode_reads(reads) for reads in self.discarded]
        return encoded

    def rewind_epoch(self) -> RowPosition:
        """Return the beginning of the current epoch; rows that were read are read again."""
        if not self.rows_read:
            return self
        return replace(self, rows_read=(), discarded=(*self.discarded, self.rows_read))

    def advance_epoch(self, *, was_incomplete: bool) -> RowPosition:
        """Return the beginning of the next epoch."""
        return RowPosition(self.epoch + 1, (), self.num_incomplete_epochs + was_incomplete)

    def advance(
        self, world_size: int, rows: int, shuffle: LocalShuffle | None = None
    ) -> RowPosition:
        """Return the position after each of `world_size` workers has read `rows` more rows."""
        if not rows:
            return self
        if self.is_continued_by(world_size, shuffle):
            *before, last = self.rows_read
            extended = replace(last, rows_per_worker=last.rows_per_worker + rows)
            return replace(self, rows_read=(*before, extended))
        return replace(self, rows_read=(*self.rows_read, RowsRead(world_size, rows, shuffle)))

    def is_continued_by(self, world_size: int, shuffle: LocalShuffle | None) -> bool:
        """Return whether workers with this shuffle continue the most recent read."""
        last = self.rows_read[-1] if self.rows_read else None
        return last is not None and (last.num_workers, last.shuffle) == (world_size, shuffle)


def encode_reads(reads: Sequence[RowsRead]) -> list[list[object]]:
    """Return reads as plain values for JSON."""
    return [entry.encode() for entry in reads]


def decode_reads(recorded: Sequence[Sequence[Any]]) -> tuple[RowsRead, ...]:
    """Decode the result of `encode_reads`."""
    return tuple(RowsRead.decode(*entry) for entry in recorded)


def split_rows(rows: int, world_size: int, uneven_rows: UnevenRows) -> RowRanges:
    """Return the consecutive rows of each rank, whose numbers differ by at most one row."""
    if uneven_rows == "drop":
        count = rows // world_size
        return tuple((rank * count, (rank + 1) * count) for rank in range(world_size))
    cuts = [rows * rank // world_size for rank in range(world_size + 1)]
    if uneven_rows == "pad":
        count = -(-rows // world_size)
        starts = (min(cut, rows - count) for cut in cuts[:-1])
        return tuple((start, start + count) for start in starts)
    return tuple(itertools.pairwise(cuts))


def split_unread(
    dataset: T,
    read: Sequence[RowsRead],
    world_size: int,
    *,
    split: Callable[[T, int], list[T]],
    exclude: Callable[[list[T], RowsRead], list[T]],
    concat: Callable[[list[T]], T],
) -> list[T]:
    """Split the unread rows of an epoch between ranks.

    If the number of ranks is the same as for the last entry, each rank continues with its own
    shard.

    Args:
        dataset: All rows.
        read: Rows that were read, in order.
        world_size: Number of shards.
        split: Splits rows into a number of shards.
        exclude: Removes the rows that were read from each shard.
        concat: Returns all unread rows, given the unread rows of each shard.
    """
    shards = [dataset]
    for entry in read:
        if len(shards) != entry.num_workers:
            shards = split(concat(shards), entry.num_workers)
        shards = exclude(shards, entry)
    return shards if len(shards) == world_size else split(concat(shards), world_size)


class NumberedRows:
    """Rows of a dataset whose row numbers are known, split between ranks.

    A split over another number of workers includes every row that was not read. That includes rows
    that `uneven_rows="drop"` had left out before, and excludes those that "pad" had duplicated.

    Args:
        blocks: Number of rows of each block. Segments do not cross block boundaries, since the
            order of a local shuffle depends on them.
        uneven_rows: Handling of rows that cannot be divided evenly.
        order: Returns the row numbers of a rank's segments in the order of a shuffle. Receives the
            segments, the shuffle, and the rank. None reads shuffled rows as if they had not been
            shuffled.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        uneven_rows: UnevenRows,
        order: Callable[[list[Segment], LocalShuffle, int], Numbers] | None = None,
    ) -> None:
        ends = list(itertools.accumulate(blocks))
        self._blocks = [range(end - rows, end) for rows, end in zip(blocks, ends, strict=True)]
        self._rows = sum(blocks)
        self._uneven_rows = uneven_rows
        self._order = order
        self._read: list[Segment] = []

    @property
    def read(self) -> list[Segment]:
        """Rows that were read, in any order. Rows that two ranks have read appear twice."""
        return self._read

    def split_unread(self, read: Sequence[RowsRead], world_size: int) -> list[list[Segment]]:
        """Return the unread rows of each rank. Call it once per object."""
        dataset: list[Segment] = [*self._blocks]
        return split_unread(
            dataset,
            read,
            world_size,
            split=self._split,
            exclude=self._exclude,
            concat=lambda _: self._unread(),
        )

    def _split(self, segments: list[Segment], world_size: int) -> list[list[Segment]]:
        rows = sum(map(len, segments))
        windows = split_rows(rows, world_size, self._uneven_rows)
        return [cut_segments(segments, low, high) for low, high in windows]

    def _exclude(self, parts: list[list[Segment]], read: RowsRead) -> list[list[Segment]]:
        unread = []
        for rank, part in enumerate(parts):
            if read.shuffle is not None and self._order is not None:
                part = _in_segments(self._order(part, read.shuffle, rank))
            self._read += cut_segments(part, 0, read.rows_per_worker)
            unread.append(cut_segments(part, read.rows_per_worker))
        return unread

    def _unread(self) -> list[Segment]:
        ranges = [segment for segment in self._read if isinstance(segment, range)]
        if len(ranges) == len(self._read):
            return self._unread_ranges(ranges)
        import numpy as np

        is_unread = np.ones(self._rows, dtype=bool)
        for segment in self._read:
            is_unread[np.asarray(segment)] = False
        return _in_segments(np.flatnonzero(is_unread))

    def _unread_ranges(self, ranges: list[range]) -> list[Segment]:
        read = merge_ranges(sorted((rows.start, rows.stop) for rows in ranges))
        unread = [range(low, high) for low, high in complement(read, self._rows)]
        return [
            common
            for block in self._blocks
            for rows in unread
            if (common := range(max(block.start, rows.start), min(block.stop, rows.stop)))
        ]


def cut_segments(segments: list[Segment], start: int, stop: int | None = None) -> list[Segment]:
    """Return the rows from position `start` to before position `stop`."""
    parts: list[Segment] = []
    before = 0
    for rows in segments:
        low, high = max(start - before, 0), len(rows) if stop is None else max(stop - before, 0)
        before += len(rows)
        if len(part := rows[low:high]):
            parts.append(part)
    return parts


def _in_segments(numbers: Numbers) -> list[Segment]:
    """Cut row numbers into segments of at most `SEGMENT_ROWS` rows."""
    starts = range(0, len(numbers), SEGMENT_ROWS)
    return [numbers[start : start + SEGMENT_ROWS] for start in starts]


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> RowRanges:
    """Merge sorted ranges that touch or overlap."""
    merged: list[tuple[int, int]] = []
    for low, high in ranges:
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Sequence[tuple[int, int]], rows: int) -> RowRanges:
    """Return the rows below `rows` that are in none of these sorted ranges."""
    gaps, end = [], 0
    for low, high in (*ranges, (rows, rows)):
        if end < low:
            gaps.append((end, low))
        end = max(end, high)
    return tuple(gaps)
