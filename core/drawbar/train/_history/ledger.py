"""Rows of its datasets that a run has read, from its journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from drawbar.train._history.events import AttemptStarted, DatasetEpochEnded, JournaledEvent
from drawbar.train._messages import PassEnded
from drawbar.train._row_positions import NumberedRows, RowRanges, cut_segments, decode_reads


@dataclass(frozen=True)
class DatasetEpoch:
    """Rows that all workers together have read of one dataset in one epoch.

    An epoch that is interrupted by restarts, also with other numbers of workers, is one epoch. Rows
    that were read after the checkpoint from which a restart resumed are not counted.

    Attributes:
        dataset: Name of the dataset.
        epoch: Number of the epoch, from 0.
        rows: Number of rows that all workers read; for a dataset that is not split, that the lowest
            rank read. None if it is unknown, for example because the order is not preserved.
        batches: Number of batches in the last iteration over each part, by the number of the part.
        ended: Whether every part was read to its end.
        ranges: Row numbers that were read, sorted, as (first, one after the last); rows in two
            ranges were read twice. None if row numbers are unknown, as for streams.
        in_all: Number of rows of the dataset; None if row numbers are unknown.
        restarts: How often the epoch restarted from its beginning, because its unread rows were
            unknown. Rows that had been read before were read again, and count in `rows` again.
    """

    dataset: str
    epoch: int
    num_rows: int | None
    num_batches: dict[int, int]
    is_complete: bool
    row_ranges: RowRanges | None
    total_rows: int | None
    restarts: int = 0

    @property
    def repeated_rows(self) -> RowRanges | None:
        """The rows that were read more than once; None if rows are not known by number."""
        if self.row_ranges is None:
            return None
        found, until = [], 0
        for low, high in self.row_ranges:
            if low < min(until, high):
                found.append((low, min(until, high)))
            until = max(until, high)
        return tuple(found)

    @property
    def unread_rows(self) -> RowRanges | None:
        """The rows that were not read; None if rows are not known by number."""
        if self.row_ranges is None or self.total_rows is None:
            return None
        found, until = [], 0
        for low, high in (*self.row_ranges, (self.total_rows, self.total_rows)):
            if until < low:
                found.append((until, low))
            until = max(until, high)
        return tuple(found)


class DataLedger:
    """The epochs of a run's datasets, in order: `for epoch in result.data_ledger`.

    It holds what passes over `get_dataset_shard(...)` have given. A pass that goes on is not in it.
    """

    def __init__(self, epochs: Sequence[DatasetEpoch]) -> None:
        self._epochs = list(epochs)

    @classmethod
    def from_events(cls, events: Iterable[JournaledEvent]) -> DataLedger:
        """Make the ledger of a journal's events.

        As with reports, an attempt that starts at report k takes the place of what came after the
        checkpoint of report k - 1.
        """
        passes: list[DatasetEpochEnded] = []
        for event in events:
            if isinstance(event, DatasetEpochEnded):
                passes.append(event)
            elif isinstance(event, AttemptStarted):
                passes = [
                    each for each in passes if each.shard_epoch.index < event.first_report_index
                ]
        by_epoch: dict[tuple[str, int], list[DatasetEpochEnded]] = {}
        for each in passes:
            by_epoch.setdefault((each.shard_epoch.dataset, each.shard_epoch.epoch), []).append(each)
        return cls([_build_epoch(*key, by_epoch[key]) for key in sorted(by_epoch)])

    def __iter__(self) -> Iterator[DatasetEpoch]:
        return iter(self._epochs)

    def __len__(self) -> int:
        return len(self._epochs)

    def __repr__(self) -> str:
        lines = [
            f"{each.dataset!r} epoch {each.epoch}: "
            f"{'?' if each.num_rows is None else each.num_rows} "
            f"rows{'' if each.is_complete else ', not all'}"
            for each in self._epochs
        ]
        return f"DataLedger({'; '.join(lines)})"


def _build_epoch(dataset: str, epoch: int, passes: Sequence[DatasetEpochEnded]) -> DatasetEpoch:
    # What earlier attempts have read and kept is in what the newest says had been read before.
    newest = max(each.attempt for each in passes)
    parts: dict[int, PassEnded] = {}
    for each in sorted(passes, key=lambda each: -each.rank):  # of a whole one the lowest rank's
        if each.attempt == newest:
            parts[each.shard_epoch.part] = each.shard_epoch
    any_part = next(iter(parts.values()))
    ended = len(parts) == any_part.parts and all(each.ended for each in parts.values())
    return DatasetEpoch(
        dataset=dataset,
        epoch=epoch,
        num_rows=_count_epoch_rows(parts),
        num_batches={number: parts[number].batches for number in sorted(parts)},
        is_complete=ended,
        row_ranges=_collect_row_ranges(parts, ended=ended),
        total_rows=any_part.in_all,
        restarts=len(any_part.discarded),
    )


def _count_epoch_rows(parts: dict[int, PassEnded]) -> int | None:
    ranges = _collect_row_ranges(parts, ended=True)
    if ranges is not None:
        return sum(high - low for low, high in ranges)
    counts = [each.rows for each in parts.values()]
    if any(count is None for count in counts):
        return None
    one = next(iter(parts.values()))
    before = [read for reads in (one.before, *one.discarded) for read in decode_reads(reads)]
    return sum(each.num_workers * each.rows_per_worker for each in before) + sum(
        filter(None, counts)
    )


def _collect_row_ranges(parts: dict[int, PassEnded], *, ended: bool) -> RowRanges | None:
    """Return the row numbers that were read.

    Until an epoch has ended, they are unknown if rows were shuffled.
    """
    one = next(iter(parts.values()))
    if one.in_all is None or any(each.rows is None for each in parts.values()):
        return None
    before = decode_reads(one.before)
    discarded = [decode_reads(each) for each in one.discarded]
    shuffled = any(each.shuffled for each in parts.values()) or any(e.shuffle for e in before)
    if (shuffled and not ended) or any(each.shuffle for reads in discarded for each in reads):
        return None
    rows = NumberedRows([one.in_all], one.uneven_rows)
    left = rows.split_unread(before, one.parts)
    taken = list(rows.read)
    for number, each in parts.items():
        taken += cut_segments(left[number], 0, each.rows)
    for reads in discarded:
        again = NumberedRows([one.in_all], one.uneven_rows)
        again.split_unread(reads, reads[-1].num_workers)
        taken += again.read
    return _merge_adjacent(
        sorted((each.start, each.stop) for each in taken if isinstance(each, range))
    )


def _merge_adjacent(ranges: Sequence[tuple[int, int]]) -> RowRanges:
    """Merge ranges that touch; ranges that overlap stay separate, since their rows count twice."""
    if not ranges:
        return ()
    merged = [ranges[0]]
    for (_, before), (low, high) in pairwise(ranges):
        if low == before and merged[-1][1] == low:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    return tuple(merged)
