"""Curves of metrics with the lowest and highest value of each pixel column."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


def read_series(run: IndexedRun) -> dict[str, list[Sample]]:
    """Return the numeric metrics of the lowest rank: some reports of a long run, else all."""

    def read() -> dict[str, list[Sample]]:
        series: dict[str, list[Sample]] = {}
        for _, step, time, name, value in _iter_values(run, None, is_sampled=True):
            series.setdefault(name, []).append((step, time, value))
        for event in run.events:
            if event["event"] == "checkpoint_validated":
                for name, value in _iter_numbers(event["metrics"]):
                    series.setdefault(name, []).append((event["index"], event["time"], value))
        return {name: sorted(samples) for name, samples in series.items()}

    result: dict[str, list[Sample]] = run.compute_once("series", read)
    return result


def list_numeric_metrics(run: IndexedRun) -> list[str]:
    """Return the names of the metrics that have curves."""
    return list(read_series(run))


def _iter_values(
    run: IndexedRun, metrics: Sequence[str] | None, *, is_sampled: bool
) -> Iterator[tuple[int, int, float, str, float]]:
    """Yield rank, report number, time, metric, and value."""
    for block in run.record.iter_report_columns(is_sampled=is_sampled):
        for column, values in block.metrics.items():
            if metrics is not None and not any(
                name == column or name.startswith(f"{column}/") for name in metrics
            ):
                continue
            for step, time, item in zip(block.indices, block.times, values, strict=True):
                if isinstance(item, Mapping):
                    for name, value in _iter_numbers({column: item}):
                        yield block.rank, step, time, name, value
                elif (number := as_number(item)) is not None:
                    yield block.rank, step, time, column, number


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
    values = _iter_values(run, metrics, is_sampled=False) if is_exact else _iter_series(run, lines)
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


def _iter_series(
    run: IndexedRun, metrics: Mapping[str, Any]
) -> Iterator[tuple[int, int, float, str, float]]:
    series = read_series(run)
    for name in metrics:
        for step, time, value in series.get(name, ()):
            yield 0, step, time, name, value


def _get_limits(
    run: IndexedRun, query: CurveQuery, metrics: Sequence[str], origin: float
) -> tuple[float, float]:
    series = read_series(run)
    own = [series[name] for name in metrics if name in series]
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
    for samples in read_series(run).values():
        steps = {step for step, _, _ in samples}
        if max(steps) - min(steps) + 1 > 2 * len(steps):
            return True
    return False


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
