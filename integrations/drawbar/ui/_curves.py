"""Curves of metrics with the lowest and highest value of each pixel column."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drawbar.train.runs import ReportColumns
from drawbar.ui._catalog import IndexedRun
from drawbar.ui._plain import as_number, flatten_settings

MAX_POINTS = 1_000
"""Maximum number of pixel columns of a curve. Each has up to two points."""
MAX_CURVES = 200
"""Maximum number of curves in a reply."""
_MAX_RANKS = 32
_MAX_BAND_POINTS = 200

Sample = tuple[int, float, float]
"""Number, time, and value of a report."""
Value = tuple[int, int, float, str, float]
"""Rank, report number, time, metric, and value."""


@dataclass(frozen=True)
class CurveQuery:
    """Requested curves.

    Attributes:
        metrics: Names of the metrics; empty for the first numeric ones.
        points: Maximum number of pixel columns.
        ranks: "lowest", "band", or "each".
        x: "step" for report numbers, or "time" for seconds since the start of the run.
        limits: Lowest and highest x; None for no limit.
        is_exact: Whether to read all reports of a long run.
    """

    metrics: Sequence[str] = ()
    points: int = 1_000
    ranks: str = "lowest"
    x: str = "step"
    limits: tuple[float | None, float | None] = (None, None)
    is_exact: bool = False


@dataclass
class _Column:
    """Lowest, highest, and last report of a curve in a pixel column."""

    low: tuple[float, float]
    high: tuple[float, float]
    last: tuple[float, float]

    def add(self, point: tuple[float, float]) -> None:
        """Add a report."""
        self.last = max(self.last, point)
        if point[1] < self.low[1]:
            self.low = point
        elif point[1] > self.high[1]:
            self.high = point


@dataclass
class _Line:
    """A curve in pixel columns."""

    low: float
    high: float
    points: int
    columns: dict[int, _Column] = field(default_factory=dict)

    def add(self, x: float, value: float) -> None:
        """Add a report."""
        if not self.low <= x <= self.high:
            return
        width = self.high - self.low
        number = int((x - self.low) / width * (self.points - 1)) if width > 0 else 0
        column = self.columns.get(number)
        if column is None:
            self.columns[number] = _Column((x, value), (x, value), (x, value))
        else:
            column.add((x, value))

    def to_dict(self) -> dict[str, list[float]]:
        """Return the lowest and highest report of each column, in order."""
        columns = (column for _, column in sorted(self.columns.items()))
        points = [point for column in columns for point in sorted({column.low, column.high})]
        return {"x": [x for x, _ in points], "y": [value for _, value in points]}


def _read_blocks(run: IndexedRun) -> list[ReportColumns]:
    """Return the reports of the lowest rank: some reports of a long run, else all."""

    def read() -> list[ReportColumns]:
        return list(run.record.iter_report_columns(is_sampled=True))

    result: list[ReportColumns] = run.compute_once("blocks", read)
    return result


def _read_series(run: IndexedRun, metric: str) -> list[Sample]:
    """Return the reports of a metric on the lowest rank: some of a long run, else all."""

    def read() -> list[Sample]:
        values = itertools.chain(_iter_values(_read_blocks(run), [metric]), _iter_validations(run))
        return sorted(
            (step, time, value) for _, step, time, name, value in values if name == metric
        )

    result: list[Sample] = run.compute_once(f"series {metric}", read)
    return result


def list_numeric_metrics(run: IndexedRun) -> list[str]:
    """Return the names of the metrics that have curves."""

    def read() -> list[str]:
        names: dict[str, None] = {}
        for block in _read_blocks(run):
            for column, values in block.metrics.items():
                if column not in names:
                    names |= dict.fromkeys(_find_numeric_names(column, values))
        names |= dict.fromkeys(name for *_, name, _ in _iter_validations(run))
        return list(names)

    result: list[str] = run.compute_once("numeric metrics", read)
    return result


def _find_numeric_names(column: str, values: Sequence[Any]) -> list[str]:
    if any(as_number(value) is not None for value in values):  # usually the first one
        return [column]
    mappings = (value for value in values if isinstance(value, Mapping))
    return [name for value in mappings for name, _ in _iter_numbers({column: value})]


def _iter_values(blocks: Iterable[ReportColumns], metrics: Sequence[str]) -> Iterator[Value]:
    """Yield the values of metrics in reports."""
    columns = {column for metric in metrics for column in _list_columns(metric)}
    for block in blocks:
        for column in block.metrics.keys() & columns:
            for step, time, item in zip(
                block.indices, block.times, block.metrics[column], strict=True
            ):
                if isinstance(item, Mapping):
                    for name, value in _iter_numbers({column: item}):
                        yield block.rank, step, time, name, value
                elif (number := as_number(item)) is not None:
                    yield block.rank, step, time, column, number


def _iter_validations(run: IndexedRun) -> Iterator[Value]:
    """Yield the metrics of validations, which belong to the lowest rank."""
    rank = next((block.rank for block in _read_blocks(run)), 0)
    for event in run.events:
        if event["event"] == "checkpoint_validated":
            for name, value in _iter_numbers(event["metrics"]):
                yield rank, event["index"], event["time"], name, value


def _list_columns(metric: str) -> list[str]:
    """Return the columns that can contain a metric: "a", "a/b", and "a/b/c" for "a/b/c"."""
    return list(itertools.accumulate(metric.split("/"), lambda *parts: "/".join(parts)))


def _iter_numbers(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in flatten_settings(metrics).items():
        number = as_number(value)
        if number is not None:
            yield name, number


def make_curves(run: IndexedRun, query: CurveQuery) -> dict[str, Any]:
    """Return the requested curves."""
    metrics = list(query.metrics or list_numeric_metrics(run))[:MAX_CURVES]
    origin = (run.record.start_time or 0.0) if query.x == "time" else 0.0
    limits = _get_limits(run, query, metrics, origin)
    is_exact = query.is_exact or query.ranks != "lowest"
    lines: dict[str, dict[int, _Line]] = {name: {} for name in metrics}
    points = min(query.points, _MAX_BAND_POINTS) if query.ranks == "band" else query.points
    values = _iter_series(run, lines)
    if is_exact:
        reported = _iter_values(run.record.iter_report_columns(), metrics)
        values = itertools.chain(reported, _iter_validations(run))
    for rank, step, time, name, value in values:
        if (ranks := lines.get(name)) is not None:
            line = ranks.get(rank)
            if line is None:
                line = ranks[rank] = _Line(*limits, points)
            line.add(time - origin if query.x == "time" else step, value)
    return {
        "x": query.x,
        "x_origin": origin,
        "is_exact": is_exact or not _is_sampled(run),
        "curves": {name: _describe(ranks, query.ranks) for name, ranks in lines.items()},
        "restarts": _list_restarts(run, query.x, origin),
    }


def _iter_series(run: IndexedRun, metrics: Iterable[str]) -> Iterator[Value]:
    for name in metrics:
        for step, time, value in _read_series(run, name):
            yield 0, step, time, name, value


def _get_limits(
    run: IndexedRun, query: CurveQuery, metrics: Sequence[str], origin: float
) -> tuple[float, float]:
    own = [_read_series(run, name) for name in metrics]
    if query.x == "time":
        xs = [time - origin for samples in own for _, time, _ in samples]
    else:
        xs = [step for samples in own for step, _, _ in samples]
    low, high = query.limits
    # Between samples of a long run, the last reports may be missing.
    return (
        min(xs, default=0.0) if low is None else low,
        max(xs, default=0.0) if high is None else high,
    )


def _is_sampled(run: IndexedRun) -> bool:
    blocks = _read_blocks(run)
    num_reports = sum(len(block.times) for block in blocks)
    numbers = [step for block in blocks for step in (block.indices[0], block.indices[-1])]
    return bool(numbers) and max(numbers) - min(numbers) + 1 > 2 * num_reports


def _describe(ranks: Mapping[int, _Line], selection: str) -> dict[str, Any]:
    if selection == "each":
        shown = sorted(ranks)[:_MAX_RANKS]
        return {"ranks": {str(rank): ranks[rank].to_dict() for rank in shown}}
    if selection == "band":
        return _make_band(list(ranks.values()))
    return ranks[min(ranks)].to_dict() if ranks else {"x": [], "y": []}


def _make_band(lines: Sequence[_Line]) -> dict[str, Any]:
    """Return the lowest, median, and highest value of the ranks in each column."""
    columns: dict[int, list[_Column]] = {}
    for line in lines:
        for number, column in line.columns.items():
            columns.setdefault(number, []).append(column)
    rows = [columns[number] for number in sorted(columns)]
    return {
        "x": [max(column.last[0] for column in row) for row in rows],
        "min": [min(column.low[1] for column in row) for row in rows],
        "median": [statistics.median(column.last[1] for column in row) for row in rows],
        "max": [max(column.high[1] for column in row) for row in rows],
        "ranks": len(lines),
    }


def _list_restarts(run: IndexedRun, x: str, origin: float) -> list[dict[str, Any]]:
    starts = [event for event in run.events if event["event"] == "attempt_started"]
    return [
        {
            "x": event["time"] - origin if x == "time" else event["first_report_index"],
            "attempt": event["attempt"],
        }
        for event in starts[1:]
    ]
