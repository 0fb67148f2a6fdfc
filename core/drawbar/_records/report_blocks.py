"""Format of the reports in a segment: one line for each block of reports, in columns.

    {"rank":0,"index":17,"time":[1.5,2.5],"metrics":{"loss":[0.3,0.2]}}

These are reports 17 and 18 of rank 0. If the numbers are not consecutive, `index` is a list. Values
of nested metrics are JSON objects. Non-finite floats are encoded as in the journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from drawbar._base.metrics import Metrics, decode_non_finite, encode_non_finite

MAX_BLOCK_REPORTS = 8192
"""Maximum number of reports in a block of a closed segment."""
NUM_SAMPLES = 32
"""Number of reports of the lowest rank in the summary of a closed segment."""

StructT = TypeVar("StructT", bound=msgspec.Struct)

_encoder = msgspec.json.Encoder()


class ReportBlock(msgspec.Struct, frozen=True):
    """Reports of one rank that have the same metric names.

    Attributes:
        rank: Rank that made the reports.
        index: Number of each report; only the first one if the numbers are consecutive.
        time: Time of each report, in seconds since the epoch.
        metrics: Values of each metric.
    """

    rank: int
    index: int | list[int]
    time: list[float]
    metrics: dict[str, list[Any]]

    def __post_init__(self) -> None:
        lengths = {len(self.time), *map(len, self.metrics.values())}
        if len(lengths) != 1 or len(self.indices) != len(self.time) or not self.time:
            raise ValueError("the columns must have the same length, which must not be 0")

    @property
    def indices(self) -> Sequence[int]:
        """Number of each report."""
        if isinstance(self.index, int):
            return range(self.index, self.index + len(self.time))
        return self.index

    @property
    def ends(self) -> tuple[int, int]:
        """Lowest and highest number."""
        if isinstance(self.index, int):
            return self.index, self.index + len(self.time) - 1
        return min(self.index), max(self.index)

    def __len__(self) -> int:
        return len(self.time)

    def get_metrics(self, row: int) -> Metrics:
        """Return the metrics of one report."""
        return {name: values[row] for name, values in self.metrics.items()}

    def select(self, rows: slice | Sequence[int]) -> ReportBlock:
        """Return a block with some of the reports, at least one."""
        indices: Sequence[int] = self.indices

        def take(values: Sequence[Any]) -> list[Any]:
            return list(values[rows]) if isinstance(rows, slice) else [values[row] for row in rows]

        return ReportBlock(
            rank=self.rank,
            index=compact_indices(take(indices)),
            time=take(self.time),
            metrics={name: take(values) for name, values in self.metrics.items()},
        )

    def select_last(self) -> ReportBlock:
        """Return a block with the last report."""
        return self if len(self) == 1 else self.select(slice(-1, None))

    def select_indices(self, first: int, end: float) -> ReportBlock | None:
        """Return the reports with numbers from `first` to before `end`; None if there are none."""
        lowest, highest = self.ends
        if first <= lowest and highest < end:
            return self
        rows = [row for row, index in enumerate(self.indices) if first <= index < end]
        return self.select(rows) if rows else None


def compact_indices(indices: list[int]) -> int | list[int]:
    """Return the first number if the numbers are consecutive, else all numbers."""
    first, count = indices[0], len(indices)
    is_range = indices[-1] - first == count - 1 and indices == list(range(first, first + count))
    return first if is_range else indices


def make_blocks(
    rank: int, indices: Sequence[int], times: Sequence[float], metrics: Sequence[Metrics]
) -> list[ReportBlock]:
    """Return the blocks for reports of one rank. Each block has consecutive reports.

    Args:
        rank: Rank that made the reports.
        indices: Number of each report.
        times: Time of each report.
        metrics: Metrics of each report.
    """
    blocks: list[ReportBlock] = []
    start = 0
    for row in range(1, len(indices) + 1):
        if row == len(indices) or metrics[row].keys() != metrics[start].keys():
            blocks.append(
                ReportBlock(
                    rank=rank,
                    index=compact_indices(list(indices[start:row])),
                    time=list(times[start:row]),
                    metrics={
                        name: [values[name] for values in metrics[start:row]]
                        for name in metrics[start]
                    },
                )
            )
            start = row
    return blocks


def merge_blocks(blocks: Iterable[ReportBlock]) -> Iterator[ReportBlock]:
    """Merge blocks into few large ones with about `MAX_BLOCK_REPORTS` reports.

    Alternating metric names of a rank lead to one block for each set of names, whose numbers are
    not consecutive. Only the blocks that are not complete yet are in memory.
    """
    groups: dict[tuple[int, tuple[str, ...]], list[ReportBlock]] = {}
    sizes: dict[tuple[int, tuple[str, ...]], int] = {}
    for block in blocks:
        key = block.rank, tuple(block.metrics)
        groups.setdefault(key, []).append(block)
        sizes[key] = sizes.get(key, 0) + len(block)
        if sizes[key] >= MAX_BLOCK_REPORTS:
            yield _concatenate(groups.pop(key))
            del sizes[key]
    yield from map(_concatenate, groups.values())


def _concatenate(blocks: Sequence[ReportBlock]) -> ReportBlock:
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0]
    return ReportBlock(
        rank=first.rank,
        index=compact_indices([index for block in blocks for index in block.indices]),
        time=[time for block in blocks for time in block.time],
        metrics={
            name: [value for block in blocks for value in block.metrics[name]]
            for name in first.metrics
        },
    )


class SegmentSummary(msgspec.Struct):
    """Summary of a segment, the first line of a closed one.

    Attributes:
        ranges: For each rank, the ranges of report numbers in the segment, from the first one to
            one after the last one.
        last: Last report of each rank in the attempt, up to the end of the segment.
        sample: Some reports of the lowest rank in the segment, for curves.
    """

    ranges: dict[int, list[tuple[int, int]]] = {}
    last: dict[int, ReportBlock] = {}
    sample: list[ReportBlock] = []

    @property
    def num_reports(self) -> int:
        """Number of reports in the segment."""
        return sum(end - first for ranges in self.ranges.values() for first, end in ranges)

    def add(self, block: ReportBlock) -> None:
        """Add the next block of the segment."""
        ranges = self.ranges.setdefault(block.rank, [])
        spans = (
            [(block.index, block.index + len(block))]
            if isinstance(block.index, int)
            else [(index, index + 1) for index in block.index]
        )
        for first, end in spans:
            if ranges and ranges[-1][1] == first:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((first, end))
        last = self.last.get(block.rank)
        if last is None or last.indices[0] < block.indices[-1]:
            self.last[block.rank] = block.select_last()

    def add_each(self, blocks: Iterable[ReportBlock]) -> Iterator[ReportBlock]:
        """Add blocks in the order of their arrival, and yield them."""
        for block in blocks:
            self.add(block)
            yield block


def encode(value: ReportBlock | SegmentSummary) -> bytes:
    """Encode a block or a summary without the end of the line."""
    line = _encoder.encode(value)
    # Non-finite floats become null. Looking for it is faster than checking all values.
    if b"null" in line:
        line = _encoder.encode(encode_non_finite(msgspec.to_builtins(value)))
    return line


class _Rank(msgspec.Struct):
    """Field of a line that `decode_rank` needs."""

    rank: int


_block_decoder = msgspec.json.Decoder(ReportBlock)
_rank_decoder = msgspec.json.Decoder(_Rank)


def decode_rank(line: bytes) -> int:
    """Return the rank of a block without its reports.

    Raises:
        Exception: One of `DECODE_ERRORS`: the line is damaged.
    """
    return _rank_decoder.decode(line).rank


def decode_block(line: bytes) -> ReportBlock:
    """Decode a block.

    Raises:
        Exception: One of `DECODE_ERRORS`: the line is damaged.
    """
    # Looking for one byte first is 10 times as fast.
    if b"$" in line and b'"$float"' in line:
        return _decode_non_finite(line, ReportBlock)
    return _block_decoder.decode(line)


def decode_summary(line: bytes) -> SegmentSummary:
    """Decode a summary.

    Raises:
        Exception: One of `DECODE_ERRORS`: the line is damaged.
    """
    return _decode_non_finite(line, SegmentSummary)


def _decode_non_finite(line: bytes, type_: type[StructT]) -> StructT:
    values = decode_non_finite(msgspec.json.decode(line))
    return msgspec.convert(values, type_, str_keys=True)
