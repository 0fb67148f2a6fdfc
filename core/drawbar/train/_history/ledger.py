"""Which rows of its datasets a run has read, told from its journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from drawbar.train._history.events import AttemptStarted, DatasetPassEnded, JournaledEvent
from drawbar.train._messages import PassEnded
from drawbar.train._rows import Ranges, Read, ranges_of, rest_of_ranges


@dataclass(frozen=True)
class DatasetEpoch:
    """What the workers together have read of one dataset in one epoch.

    An epoch that went through restarts, and other numbers of workers, is one epoch. What was read
    and then lost with the attempt is not part of it.

    Attributes:
        dataset: Name of the dataset.
        epoch: Its number, from 0.
        rows: How many rows were read, by all workers together; of a dataset that is not split, by
            the lowest rank. None if that cannot be told, as where the order is not kept.
        batches: How many batches each part's last pass had, by the number of the part.
        ended: Whether every part was read to its end.
        ranges: The rows that were read, by number and in order, where rows are known by number: of
            tables. Those of one range may be in another one too. Else None.
        in_all: Rows of the dataset then.
    """

    dataset: str
    epoch: int
    rows: int | None
    batches: dict[int, int]
    ended: bool
    ranges: Ranges | None
    in_all: int | None

    @property
    def repeated(self) -> Ranges | None:
        """The rows that were read more than once; None if rows are not known by number."""
        if self.ranges is None:
            return None
        found, until = [], 0
        for low, high in self.ranges:
            if low < min(until, high):
                found.append((low, min(until, high)))
            until = max(until, high)
        return tuple(found)

    @property
    def left_out(self) -> Ranges | None:
        """The rows that were not read; None if rows are not known by number."""
        if self.ranges is None or self.in_all is None:
            return None
        found, until = [], 0
        for low, high in (*self.ranges, (self.in_all, self.in_all)):
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
    def of(cls, events: Iterable[JournaledEvent]) -> DataLedger:
        """Make the ledger of a journal's events.

        As with reports, an attempt that starts at report k takes the place of what came after the
        checkpoint of report k - 1.
        """
        passes: list[DatasetPassEnded] = []
        for event in events:
            if isinstance(event, DatasetPassEnded):
                passes.append(event)
            elif isinstance(event, AttemptStarted):
                passes = [each for each in passes if each.passed.index < event.first_index]
        by_epoch: dict[tuple[str, int], list[DatasetPassEnded]] = {}
        for each in passes:
            by_epoch.setdefault((each.passed.dataset, each.passed.epoch), []).append(each)
        return cls([_epoch(*key, by_epoch[key]) for key in sorted(by_epoch)])

    def __iter__(self) -> Iterator[DatasetEpoch]:
        return iter(self._epochs)

    def __len__(self) -> int:
        return len(self._epochs)

    def __repr__(self) -> str:
        lines = [
            f"{each.dataset!r} epoch {each.epoch}: "
            f"{'?' if each.rows is None else each.rows} rows{'' if each.ended else ', not all'}"
            for each in self._epochs
        ]
        return f"DataLedger({'; '.join(lines)})"


def _epoch(dataset: str, epoch: int, passes: Sequence[DatasetPassEnded]) -> DatasetEpoch:
    # What earlier attempts have read and kept is in what the newest says had been read before.
    newest = max(each.attempt for each in passes)
    parts: dict[int, PassEnded] = {}
    for each in sorted(passes, key=lambda each: -each.rank):  # of a whole one the lowest rank's
        if each.attempt == newest:
            parts[each.passed.part] = each.passed
    any_part = next(iter(parts.values()))
    ended = len(parts) == any_part.parts and all(each.ended for each in parts.values())
    return DatasetEpoch(
        dataset=dataset,
        epoch=epoch,
        rows=_rows(parts),
        batches={number: parts[number].batches for number in sorted(parts)},
        ended=ended,
        ranges=_ranges(parts, ended=ended),
        in_all=any_part.in_all,
    )


def _rows(parts: dict[int, PassEnded]) -> int | None:
    ranges = _ranges(parts, ended=True)
    if ranges is not None:
        return sum(high - low for low, high in ranges)
    counts = [each.rows for each in parts.values()]
    if any(count is None for count in counts):
        return None
    before = [Read.decode(*each) for each in next(iter(parts.values())).before]
    return sum(each.workers * each.rows for each in before) + sum(filter(None, counts))


def _ranges(parts: dict[int, PassEnded], *, ended: bool) -> Ranges | None:
    """Give the rows by number. A shuffle takes other ones first, but all of them in the end."""
    one = next(iter(parts.values()))
    if one.in_all is None or any(each.rows is None for each in parts.values()):
        return None
    before = [Read.decode(*each) for each in one.before]
    shuffled = any(each.shuffled for each in parts.values()) or any(e.shuffle for e in before)
    if shuffled and not ended:
        return None
    left, read = rest_of_ranges(one.in_all, before, one.parts, one.equalize)
    taken = [*read]
    for number, each in parts.items():
        taken.extend(ranges_of(left[number], 0, each.rows))
    return _merged(sorted(taken))


def _merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Join ranges that meet, and leave those that overlap as they are."""
    if not ranges:
        return ()
    merged = [ranges[0]]
    for (_, before), (low, high) in pairwise(ranges):
        if low == before and merged[-1][1] == low:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    return tuple(merged)
