"""Turn reports into the points that a tracker shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from drawbar.train.runs import AttemptRow, ReportRow

Ranks = int | Literal["mean", "min", "max", "all"]
REDUCTIONS = ("mean", "min", "max")

REDUCTION_KEY = 0
"""Key of the points of a reduction in a cursor."""

MAX_PENDING_ROUNDS = 100_000
"""Number of incomplete rounds from which on the oldest is sent without the missing ranks."""


@dataclass(frozen=True)
class Point:
    """Values of one report, or of one round of reports.

    Attributes:
        attempt: Number of the attempt.
        key: Rank, or 0 for a reduction over all ranks.
        index: Number of the report.
        time: Time of the report, or of the last report of a round, in seconds since the epoch.
        values: Numbers by metric name; {} if the report has none.

    Example:
        An identifier that is the same if a point is sent again:

            f"{point.attempt}-{point.key}-{point.index}"
    """

    attempt: int
    key: int
    index: int
    time: float
    values: dict[str, float]


def get_numbers(metrics: Mapping[str, object], prefix: str = "") -> dict[str, float]:
    """Return the numbers in metrics. Names of nested metrics are joined with "/".

    Strings, None, and lists are left out. Booleans are 0 or 1.
    """
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            numbers.update(get_numbers(value, f"{prefix}{name}/"))
        elif isinstance(value, int | float):
            try:
                numbers[f"{prefix}{name}"] = float(value)
            except OverflowError:  # an integer above the maximum of a float
                numbers[f"{prefix}{name}"] = math.inf if value > 0 else -math.inf
    return numbers


@dataclass
class _Round:
    """Reports of the ranks with the same number.

    Attributes:
        num_reports: Number of ranks that have reported.
        time: Time of the last report.
        totals: For each metric, the sum, minimum, or maximum, and the number of values.
    """

    num_reports: int = 0
    time: float = 0.0
    totals: dict[str, tuple[float, int]] = field(default_factory=dict)


class PointMaker:
    """Make points from the rows of a feed.

    Args:
        ranks: A reduction, for one point per round of reports. Otherwise, there is one point per
            report, and the feed only has reports of these ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._attempt = -1
        self._num_workers = 0
        self._rounds: dict[int, _Round] = {}  # in ascending order, as all ranks report in order

    def start_attempt(self, row: AttemptRow) -> Iterator[Point]:
        """Yield the remaining points of the attempt before this one."""
        for index in sorted(self._rounds):
            if index < row.first_index:
                yield self._make_point(index)
        self._rounds.clear()
        self._attempt, self._num_workers = row.attempt, row.num_workers

    def add(self, row: ReportRow) -> Iterator[Point]:
        """Yield the points that are complete with this report."""
        if self._ranks in REDUCTIONS:
            yield from self._add_to_round(row)
            return
        numbers = get_numbers(row.metrics, f"rank_{row.rank}/" if self._ranks == "all" else "")
        yield Point(row.attempt, row.rank, row.index, row.time, numbers)

    def finish(self) -> Iterator[Point]:
        """Yield the remaining points at the end of the run."""
        for index in sorted(self._rounds):
            yield self._make_point(index)

    def _add_to_round(self, row: ReportRow) -> Iterator[Point]:
        current = self._rounds.setdefault(row.index, _Round())
        current.num_reports += 1
        current.time = max(current.time, row.time)
        for name, value in get_numbers(row.metrics).items():
            total, count = current.totals.get(name, (value, 0))
            current.totals[name] = (self._combine(total, value) if count else value), count + 1
        while self._rounds:
            index = next(iter(self._rounds))
            is_complete = self._rounds[index].num_reports >= self._num_workers
            if not is_complete and len(self._rounds) <= MAX_PENDING_ROUNDS:
                return
            yield self._make_point(index)

    def _combine(self, total: float, value: float) -> float:
        if self._ranks == "mean":
            return total + value
        # min() and max() would return NaN or not, depending on the order.
        if math.isnan(total) or math.isnan(value):
            return math.nan
        return min(total, value) if self._ranks == "min" else max(total, value)

    def _make_point(self, index: int) -> Point:
        current = self._rounds.pop(index)
        is_mean = self._ranks == "mean"
        values = {
            name: total / count if is_mean else total
            for name, (total, count) in current.totals.items()
        }
        return Point(self._attempt, REDUCTION_KEY, index, current.time, values)
