"""Compare the metrics of two runs step by step, for `drawbar verify --trajectory`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from drawbar.cli._output import flatten

_COLUMNS = {"rank", "index", "attempt", "time"}
"""Columns of a report that are no metrics."""

Curve = Mapping[float, tuple[float, int]]
"""Value and attempt of a metric by step."""


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """First step at which a metric of two runs differs.

    Args:
        step: The step.
        values: Value in each run; None if the run skipped the step.
        attempts: Attempt of each value; None if the run skipped the step.
        difference: Relative difference of the values; infinite if one is missing or not finite.
    """

    step: float
    values: tuple[float | None, float | None]
    attempts: tuple[int | None, int | None]
    difference: float


@dataclass(frozen=True, kw_only=True)
class MetricComparison:
    """Comparison of one metric of two runs.

    Args:
        metric: Name of the metric.
        num_steps: Number of steps that both runs have.
        max_difference: Largest relative difference at these steps.
        first_difference: First step outside the tolerance; None if there is none.
    """

    metric: str
    num_steps: int
    max_difference: float
    first_difference: FirstDifference | None


def make_curves(rows: Iterable[Mapping[str, object]], step: str | None) -> dict[str, Curve]:
    """Return the curves of all numeric metrics, from the lowest rank that has reported a step.

    Args:
        rows: Reports of all ranks, sorted by report number and rank.
        step: Metric with the number of the step. Default: the number of the report.

    Returns:
        The curve of each metric. If a step was reported several times, the last value counts.
    """
    curves: dict[str, dict[float, tuple[float, int]]] = {}
    last_index: object = None
    for row in rows:
        if row["index"] == last_index:
            continue  # a higher rank
        last_index = row["index"]
        metrics = flatten({key: row[key] for key in row if key not in _COLUMNS})
        number = row["index"] if step is None else metrics.pop(step, None)
        if not isinstance(number, int | float) or math.isnan(number):
            continue
        attempt = cast("int", row["attempt"])
        for name, value in metrics.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                curves.setdefault(name, {})[number] = float(value), attempt
    return dict(curves)


def compare_curves(
    curves: Sequence[Mapping[str, Curve]], metrics: Sequence[str], tolerance: float
) -> list[MetricComparison]:
    """Compare two runs.

    Args:
        curves: Curves of each run.
        metrics: Metrics to compare.
        tolerance: Largest relative difference of values that count as equal.
    """
    # Afterwards, only one run has steps.
    last_step = min(max(map(max, run.values()), default=-math.inf) for run in curves)
    return [
        _compare(name, curves[0][name], curves[1][name], tolerance, last_step) for name in metrics
    ]


def _compare(
    metric: str, first: Curve, second: Curve, tolerance: float, last_step: float
) -> MetricComparison:
    common = first.keys() & second.keys()
    largest, found = 0.0, None
    for step in sorted(first.keys() | second.keys()):
        if step > last_step:
            break
        points = first.get(step), second.get(step)
        values = points[0] and points[0][0], points[1] and points[1][0]
        difference = relative_difference(*values)
        if step in common:
            largest = max(largest, difference)
        if found is None and not difference <= tolerance:
            attempts = points[0] and points[0][1], points[1] and points[1][1]
            found = FirstDifference(
                step=step, values=values, attempts=attempts, difference=difference
            )
    return MetricComparison(
        metric=metric, num_steps=len(common), max_difference=largest, first_difference=found
    )


def relative_difference(first: float | None, second: float | None) -> float:
    """Return the difference of two values, divided by the larger absolute value.

    Equal values, also two NaNs, have the difference 0. A missing value, or one that is not finite,
    differs from all others by infinity.

    Example:
        >>> relative_difference(1.0, 0.5)
        0.5
    """
    if first is None or second is None:
        return math.inf
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second))
