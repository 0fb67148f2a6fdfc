"""Row numbers of a dataset: which rank gets which rows, which were read, and which are unread.

All ranks read equally many rows of their parts, so the entry "each of 2 workers has read 500 rows"
identifies the unread rows: split the dataset again and leave 500 rows out of each part. A position
lists these entries, one for each world size that the epoch has gone through.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

UnevenRows = Literal["drop", "pad", "keep", "error"]
"""What is done about rows that the ranks cannot share equally; see `DataConfig.uneven_rows`."""

RowRanges = tuple[tuple[int, int], ...]
"""Rows as (first, one after the last)."""

Segment: TypeAlias = "range | Numbers"
"""Row numbers of one block, in the order in which they are read: a `range`, or an array."""

SEGMENT_ROWS = 65_536
"""Maximum length of a segment that is an array."""

T = TypeVar("T")


@dataclass(frozen=True)
class LocalShuffle:
    """A shuffle within a rank's part that comes out the same each time.

    Args:
        buffer: `local_shuffle_buffer_size` of the pass.
        batch_size: Rows of a batch, on which the order depends too.
        seed: What the user set; each epoch and rank makes its own of it.
    """

    buffer_size: int
    batch_size: int
    seed: int

    def compute_seed(self, epoch: int, rank: int) -> int:
        """Give the seed of one rank's shuffle in one epoch."""
        import numpy as np

        return int(np.random.SeedSequence([self.seed, epoch, rank]).generate_state(1)[0])

    def make_iterator_options(self, epoch: int, rank: int) -> dict[str, int]:
        """Give Ray Data's arguments for one rank's shuffle in one epoch."""
        return {
            "batch_size": self.batch_size,
            "local_shuffle_buffer_size": self.buffer_size,
            "local_shuffle_seed": self.compute_seed(epoch, rank),
        }


@dataclass(frozen=True)
class RowsRead:
    """Rows that were read: so many by each of so many workers, maybe in a shuffled order."""

    num_workers: int
    rows_per_worker: int
    shuffle: LocalShuffle | None = None

    def encode(self) -> list[object]:
        """Give plain values."""
        shuffled = [] if self.shuffle is None else [asdict(self.shuffle)]
        return [self.num_workers, self.rows_per_worker, *shuffled]

    @staticmethod
    def decode(workers: int, rows: int, shuffle: Mapping[str, int] | None = None) -> RowsRead:
        """Read what `encode` has made."""
        return RowsRead(workers, rows, None if shuffle is None else LocalShuffle(**shuffle))


@dataclass(frozen=True)
class RowPosition:
    """Position in a dataset: completed epochs, and the rows read of the current epoch.

    Attributes:
        epoch: Number of the current epoch.
        read: Rows that were read of it.
        cut_short: Number of earlier epochs that were left before their end. Ray Data, which
            reshuffles files for each execution, does not count those.
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
        discarded = tuple(decode_reads(each) for each in recorded.get("discarded", ()))
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
            encoded["discarded"] = [encode_reads(each) for each in self.discarded]
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
            grown = replace(last, rows_per_worker=last.rows_per_worker + rows)
            return replace(self, rows_read=(*before, grown))
        return replace(self, rows_read=(*self.rows_read, RowsRead(world_size, rows, shuffle)))

    def is_continued_by(self, world_size: int, shuffle: LocalShuffle | None) -> bool:
        """Return whether workers with this shuffle continue the most recent read."""
        last = self.rows_read[-1] if self.rows_read else None
        return last is not None and (last.num_workers, last.shuffle) == (world_size, shuffle)


def encode_reads(reads: Sequence[RowsRead]) -> list[list[object]]:
    """Return reads as plain values for JSON."""
    return [each.encode() for each in reads]


def decode_reads(recorded: Sequence[Sequence[Any]]) -> tuple[RowsRead, ...]:
    """Decode the result of `encode_reads`."""
    return tuple(RowsRead.decode(*each) for each in recorded)


def split_rows(rows: int, world_size: int, uneven_rows: UnevenRows) -> RowRanges:
    """Say which rows each rank gets: consecutive ones, as many as another, or one more."""
    if uneven_rows == "drop":
        each = rows // world_size
        return tuple((rank * each, (rank + 1) * each) for rank in range(world_size))
    cuts = [rows * rank // world_size for rank in range(world_size + 1)]
    if uneven_rows == "pad":
        most = -(-rows // world_size)
        return tuple((start, start + most) for start in (min(c, rows - most) for c in cuts[:-1]))
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

    If the last readers were as many as there are now, each rank continues with its own part.

    Args:
        whole: All rows.
        read: Rows that were read, in order.
        world_size: Number of parts.
        split: Splits rows into so many parts.
        leave_out: Removes the rows that were read from each part.
        join: Returns all unread rows, given the unread rows of each part.
    """
    left = [dataset]
    for each in read:
        if len(left) != each.num_workers:
            left = split(concat(left), each.num_workers)
        left = exclude(left, each)
    return left if len(left) == world_size else split(concat(left), world_size)


class NumberedRows:
    """Rows of a dataset whose row numbers are known, split between ranks.

    A split over another number of workers includes every row that was not read. That includes rows
    that `uneven_rows="drop"` had left out before, and excludes those that "pad" had duplicated.

    Args:
        blocks: Number of rows of each block. Segments do not cross block boundaries, since the
            order of a local shuffle depends on them.
        uneven_rows: How rows are shared that cannot be shared equally.
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
        self._equalize = uneven_rows
        self._order = order
        self._read: list[Segment] = []

    @property
    def read(self) -> list[Segment]:
        """Rows that were read, in any order; rows that two ranks have read are in it twice."""
        return self._read

    def split_unread(self, read: Sequence[RowsRead], world_size: int) -> list[list[Segment]]:
        """Return the unread rows of each rank. Call it once per object."""
        dataset: list[Segment] = [*self._blocks]
        return split_unread(
            dataset,
            read,
            world_size,
            split=self._split,
            exclude=self._leave_out,
            concat=lambda _: self._unread(),
        )

    def _split(self, segments: list[Segment], world_size: int) -> list[list[Segment]]:
        rows = sum(map(len, segments))
        windows = split_rows(rows, world_size, self._equalize)
        return [cut_segments(segments, low, high) for low, high in windows]

    def _leave_out(self, parts: list[list[Segment]], read: RowsRead) -> list[list[Segment]]:
        left = []
        for rank, part in enumerate(parts):
            if read.shuffle is not None and self._order is not None:
                part = _in_segments(self._order(part, read.shuffle, rank))
            self._read += cut_segments(part, 0, read.rows_per_worker)
            left.append(cut_segments(part, read.rows_per_worker))
        return left

    def _unread(self) -> list[Segment]:
        ranges = [each for each in self._read if isinstance(each, range)]
        if len(ranges) == len(self._read):
            return self._unread_ranges(ranges)
        import numpy as np

        is_unread = np.ones(self._rows, dtype=bool)
        for each in self._read:
            is_unread[np.asarray(each)] = False
        return _in_segments(np.flatnonzero(is_unread))

    def _unread_ranges(self, ranges: list[range]) -> list[Segment]:
        read = merge_ranges(sorted((each.start, each.stop) for each in ranges))
        unread = [range(*each) for each in complement(read, self._rows)]
        return [
            common
            for block in self._blocks
            for each in unread
            if (common := range(max(block.start, each.start), min(block.stop, each.stop)))
        ]


def cut_segments(segments: list[Segment], start: int, stop: int | None = None) -> list[Segment]:
    """Return the rows from position `start` to before position `stop`."""
    found: list[Segment] = []
    before = 0
    for each in segments:
        low, high = max(start - before, 0), len(each) if stop is None else max(stop - before, 0)
        before += len(each)
        if len(part := each[low:high]):
            found.append(part)
    return found


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
    found, until = [], 0
    for low, high in (*ranges, (rows, rows)):
        if until < low:
            found.append((until, low))
        until = max(until, high)
    return tuple(found)
