"""`DataLedger`: which rows of each dataset a run has read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from drawbar._base.api import set_public_module
from drawbar._data.row_positions import (
    NumberedRows,
    RowRanges,
    complement,
    cut_segments,
    decode_reads,
)
from drawbar._records.events import (
    AttemptStarted,
    DatasetEpochEnded,
    JournaledEvent,
    ShardEpochEnded,
)


@dataclass(frozen=True)
class DatasetEpoch:
    """Rows that all workers together have read of one dataset in one epoch.

    If a restart interrupts an iteration, the iterations before and after it belong to the same
    epoch, also if the number of workers changes. Rows are not counted if they were read after the
    checkpoint from which the restart resumed.

    Attributes:
        dataset: Name of the dataset.
        epoch: Number of the epoch, from 0.
        num_rows: Number of rows that all workers together have read. For a dataset that is not
            split, the number of rows that the lowest rank has read. None if it is unknown, for
            example because the order is not preserved.
        num_batches: Number of batches in the last iteration over each shard, by shard index.
        is_complete: Whether every shard was read to its end.
        row_ranges: Row numbers that were read, as sorted pairs (first, one after the last). Rows in
            two ranges were read twice. None if row numbers are unknown, as for streams.
        total_rows: Number of rows of the dataset; None if row numbers are unknown.
        restarts: Number of times that the epoch restarted from its beginning, because its unread
            rows were unknown. Rows that are read again count again in `num_rows`.

    Example:
        Check that every row was read once:

            for epoch in result.data_ledger:
                assert epoch.is_complete and epoch.repeated_rows == epoch.unread_rows == ()
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
        """Rows that were read more than once; None if row numbers are unknown."""
        if self.row_ranges is None:
            return None
        repeated, until = [], 0
        for low, high in self.row_ranges:
            if low < min(until, high):
                repeated.append((low, min(until, high)))
            until = max(until, high)
        return tuple(repeated)

    @property
    def unread_rows(self) -> RowRanges | None:
        """Rows that were not read; None if row numbers are unknown."""
        if self.row_ranges is None or self.total_rows is None:
            return None
        return complement(self.row_ranges, self.total_rows)


class DataLedger:
    """Epochs of the datasets of a run, sorted by dataset and epoch.

    Contains iterations over `get_dataset_shard(...)` that have ended.

    Args:
        epochs: The epochs, sorted.

    Example:
        Print how many rows were read in each epoch:

            for epoch in result.data_ledger:
                print(epoch.dataset, epoch.epoch, epoch.num_rows)
    """

    def __init__(self, epochs: Sequence[DatasetEpoch]) -> None:
        self._epochs = list(epochs)

    @classmethod
    def from_events(cls, events: Iterable[JournaledEvent]) -> DataLedger:
        """Build the ledger from the events of a journal.

        If an attempt resumes from the checkpoint of report k, epochs that ended after report k in
        earlier attempts are left out.

        Args:
            events: Events of a run.

        Returns:
            The ledger.
        """
        ended: list[DatasetEpochEnded] = []
        for event in events:
            if isinstance(event, DatasetEpochEnded):
                ended.append(event)
            elif isinstance(event, AttemptStarted):
                first = event.first_report_index
                ended = [epoch for epoch in ended if epoch.shard_epoch.report_index < first]
        by_epoch: dict[tuple[str, int], list[DatasetEpochEnded]] = {}
        for event in ended:
            by_epoch.setdefault((event.shard_epoch.dataset, event.shard_epoch.epoch), []).append(
                event
            )
        return cls([_build_epoch(*key, by_epoch[key]) for key in sorted(by_epoch)])

    def __iter__(self) -> Iterator[DatasetEpoch]:
        return iter(self._epochs)

    def __len__(self) -> int:
        return len(self._epochs)

    def __repr__(self) -> str:
        lines = [
            f"{epoch.dataset!r} epoch {epoch.epoch}: "
            f"{'?' if epoch.num_rows is None else epoch.num_rows} "
            f"rows{'' if epoch.is_complete else ', incomplete'}"
            for epoch in self._epochs
        ]
        return f"DataLedger({'; '.join(lines)})"


def _build_epoch(dataset: str, epoch: int, ended: Sequence[DatasetEpochEnded]) -> DatasetEpoch:
    # The last attempt's `before` includes the rows that earlier attempts read and that count.
    newest = max(event.attempt for event in ended)
    shards: dict[int, ShardEpochEnded] = {}
    # If the dataset is not split, all ranks have the same shard, and the lowest rank's is used.
    for event in sorted(ended, key=lambda event: -event.rank):
        if event.attempt == newest:
            shards[event.shard_epoch.shard_index] = event.shard_epoch
    any_shard = next(iter(shards.values()))
    is_complete = len(shards) == any_shard.num_shards and all(
        shard.is_complete for shard in shards.values()
    )
    return DatasetEpoch(
        dataset=dataset,
        epoch=epoch,
        num_rows=_count_epoch_rows(shards),
        num_batches={number: shards[number].num_batches for number in sorted(shards)},
        is_complete=is_complete,
        row_ranges=_collect_row_ranges(shards, is_complete=is_complete),
        total_rows=any_shard.total_rows,
        restarts=len(any_shard.discarded),
    )


def _count_epoch_rows(shards: dict[int, ShardEpochEnded]) -> int | None:
    ranges = _collect_row_ranges(shards, is_complete=True)
    if ranges is not None:
        return sum(high - low for low, high in ranges)
    counts = [shard.num_rows for shard in shards.values()]
    if any(count is None for count in counts):
        return None
    any_shard = next(iter(shards.values()))
    before = [
        read
        for reads in (any_shard.previous_reads, *any_shard.discarded)
        for read in decode_reads(reads)
    ]
    return sum(read.num_workers * read.rows_per_worker for read in before) + sum(
        filter(None, counts)
    )


def _collect_row_ranges(
    shards: dict[int, ShardEpochEnded], *, is_complete: bool
) -> RowRanges | None:
    """Return the row numbers that were read.

    Until an epoch has ended, they are unknown if rows were shuffled.
    """
    any_shard = next(iter(shards.values()))
    if any_shard.total_rows is None or any(shard.num_rows is None for shard in shards.values()):
        return None
    before = decode_reads(any_shard.previous_reads)
    discarded = [decode_reads(reads) for reads in any_shard.discarded]
    shuffled = any(shard.is_shuffled for shard in shards.values()) or any(
        read.shuffle for read in before
    )
    if (shuffled and not is_complete) or any(read.shuffle for reads in discarded for read in reads):
        return None
    rows = NumberedRows([any_shard.total_rows], any_shard.uneven_rows)
    unread = rows.split_unread(before, any_shard.num_shards)
    read_ranges = list(rows.read)
    for number, shard in shards.items():
        read_ranges += cut_segments(unread[number], 0, shard.num_rows)
    for reads in discarded:
        repeated = NumberedRows([any_shard.total_rows], any_shard.uneven_rows)
        repeated.split_unread(reads, reads[-1].num_workers)
        read_ranges += repeated.read
    return _merge_adjacent(
        sorted((entry.start, entry.stop) for entry in read_ranges if isinstance(entry, range))
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


set_public_module(globals(), module="drawbar.train", names=["DataLedger", "DatasetEpoch"])
