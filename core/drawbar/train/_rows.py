"""Rows of a dataset by number: whose they are, how far they have been read, and what is left.

All ranks read equally many rows of their parts. So "each of 2 workers had read 500 rows" says which
rows are left: split the dataset again, leave 500 rows of each part out. The list of such entries,
one for every world size that an epoch has gone through, is the position.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

Equalize = Literal["drop", "pad", "join", "strict"]
"""What is done about rows that the ranks cannot share equally; see `DataConfig.equalize`."""

Ranges = tuple[tuple[int, int], ...]
"""Rows as (first, one after the last)."""

T = TypeVar("T")


@dataclass(frozen=True)
class Shuffle:
    """A shuffle within a rank's part that comes out the same each time.

    Args:
        buffer: `local_shuffle_buffer_size` of the pass.
        batch_size: Rows of a batch, on which the order depends too.
        seed: What the user set; each epoch and rank makes its own of it.
    """

    buffer: int
    batch_size: int
    seed: int

    def seed_of(self, epoch: int, rank: int) -> int:
        """Give the seed of one rank's shuffle in one epoch."""
        import numpy as np

        return int(np.random.SeedSequence([self.seed, epoch, rank]).generate_state(1)[0])

    def options(self, epoch: int, rank: int) -> dict[str, int]:
        """Give Ray Data's arguments for one rank's shuffle in one epoch."""
        return {
            "batch_size": self.batch_size,
            "local_shuffle_buffer_size": self.buffer,
            "local_shuffle_seed": self.seed_of(epoch, rank),
        }


@dataclass(frozen=True)
class Read:
    """Rows that were read: so many by each of so many workers, maybe in a shuffled order."""

    workers: int
    rows: int
    shuffle: Shuffle | None = None

    def encode(self) -> list[object]:
        """Give plain values."""
        shuffled = [] if self.shuffle is None else [asdict(self.shuffle)]
        return [self.workers, self.rows, *shuffled]

    @staticmethod
    def decode(workers: int, rows: int, shuffle: Mapping[str, int] | None = None) -> Read:
        """Read what `encode` has made."""
        return Read(workers, rows, None if shuffle is None else Shuffle(**shuffle))


@dataclass(frozen=True)
class RowPosition:
    """How far a dataset has been read: so many epochs, and this much of the next.

    Attributes:
        epoch: Number of the epoch.
        read: What has been read of it.
        cut_short: How many of the epochs before were left before their end: Ray Data, which
            shuffles files anew each time it has gone through them, does not count those.
    """

    epoch: int = 0
    read: tuple[Read, ...] = ()
    cut_short: int = 0

    @staticmethod
    def decode(recorded: Mapping[str, Any] | None) -> RowPosition:
        """Read what `encode` has made; the beginning for None."""
        if recorded is None:
            return RowPosition()
        read = tuple(Read.decode(*each) for each in recorded["read"])
        return RowPosition(recorded["epoch"], read, recorded.get("cut_short", 0))

    def encode(self) -> dict[str, Any]:
        """Give plain values."""
        cut_short = {"cut_short": self.cut_short} if self.cut_short else {}
        return {"epoch": self.epoch, "read": [each.encode() for each in self.read], **cut_short}

    def begun(self) -> RowPosition:
        """Give the beginning of the epoch that this one is in."""
        return replace(self, read=())

    def passed(self, *, cut_short: bool) -> RowPosition:
        """Give the beginning of the next epoch."""
        return RowPosition(self.epoch + 1, (), self.cut_short + cut_short)

    def after(self, world_size: int, rows: int, shuffle: Shuffle | None = None) -> RowPosition:
        """Give the position after each of so many workers has read so many rows more."""
        if not rows:
            return self
        if self.goes_on(world_size, shuffle):
            *before, last = self.read
            grown = replace(last, rows=last.rows + rows)
            return replace(self, read=(*before, grown))
        return replace(self, read=(*self.read, Read(world_size, rows, shuffle)))

    def goes_on(self, world_size: int, shuffle: Shuffle | None) -> bool:
        """Whether so many workers, who shuffle so, go on with what they have read last."""
        last = self.read[-1] if self.read else None
        return last is not None and (last.workers, last.shuffle) == (world_size, shuffle)


def shares(rows: int, world_size: int, equalize: Equalize) -> Ranges:
    """Say which rows each rank gets: consecutive ones, as many as another, or one more."""
    if equalize == "drop":
        each = rows // world_size
        return tuple((rank * each, (rank + 1) * each) for rank in range(world_size))
    cuts = [rows * rank // world_size for rank in range(world_size + 1)]
    if equalize == "pad":
        most = -(-rows // world_size)
        return tuple((start, start + most) for start in (min(c, rows - most) for c in cuts[:-1]))
    return tuple(itertools.pairwise(cuts))


def rest(
    whole: T,
    read: Sequence[Read],
    world_size: int,
    *,
    split: Callable[[T, int], list[T]],
    leave_out: Callable[[list[T], Read], list[T]],
    join: Callable[[list[T]], T],
) -> list[T]:
    """Give each rank its part of what has not been read.

    Where the last readers were as many as there are now, each goes on with its own part.

    Args:
        whole: All rows.
        read: What has been read of them.
        world_size: Number of parts.
        split: Gives so many parts.
        leave_out: Gives what is left of each part after that.
        join: Gives parts one after the other.
    """
    left = [whole]
    for each in read:
        if len(left) != each.workers:
            left = split(join(left), each.workers)
        left = leave_out(left, each)
    return left if len(left) == world_size else split(join(left), world_size)


def ranges_of(ranges: Ranges, start: int, stop: int | None = None) -> Ranges:
    """Give the rows from the `start`-th of these ranges to before the `stop`-th."""
    found, before = [], 0
    for low, high in ranges:
        first = low + max(start - before, 0)
        last = high if stop is None else min(high, low + stop - before)
        before += high - low
        if first < last:
            found.append((first, last))
    return tuple(found)


def share_ranges(ranges: Ranges, world_size: int, equalize: Equalize) -> list[Ranges]:
    """Share rows as `shares` does."""
    rows = sum(high - low for low, high in ranges)
    return [ranges_of(ranges, low, high) for low, high in shares(rows, world_size, equalize)]


def rest_of_ranges(
    rows: int, read: Sequence[Read], world_size: int, equalize: Equalize
) -> tuple[list[Ranges], Ranges]:
    """Give the rows that each rank has left, and those that were read, of so many by number.

    Rows that were read in a shuffled order are counted as if they had not been.
    """
    taken: list[tuple[int, int]] = []

    def leave_out(left: list[Ranges], each: Read) -> list[Ranges]:
        taken.extend(found for part in left for found in ranges_of(part, 0, each.rows))
        return [ranges_of(part, each.rows) for part in left]

    left: list[Ranges] = rest(
        ((0, rows),),
        read,
        world_size,
        split=lambda ranges, workers: share_ranges(ranges, workers, equalize),
        leave_out=leave_out,
        join=lambda parts: tuple(found for part in parts for found in part),
    )
    return left, tuple(taken)
