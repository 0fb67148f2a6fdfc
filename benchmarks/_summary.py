"""From samples to medians and ratios. Pure: no Ray, no clock, no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from benchmarks._rounds import Outcomes
from benchmarks._scenario import Goal, Measure, Scenario, Side


@dataclass(frozen=True)
class Statistic:
    """The samples of one side for one measure, over all rounds."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Verdict:
    """A goal and its measured ratio. `met` is None if there is no bound or no value."""

    goal: Goal
    value: float | None
    met: bool | None


@dataclass(frozen=True)
class Row:
    """One measure: each side's statistic, and the verdict on each goal."""

    measure: Measure
    statistics: Mapping[Side, Statistic]
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Summary:
    """One scenario's rows, and what went wrong on which side."""

    scenario: Scenario
    rows: tuple[Row, ...]
    failures: Mapping[Side, str]


def summarize(scenario: Scenario, outcomes: Outcomes) -> Summary:
    """Compute result rows from the samples of all systems."""
    failures = {
        side: f"{len(outcome.failures)} of {outcome.rounds} rounds failed: {outcome.failures[0]}"
        for side, outcome in outcomes.items()
        if outcome.failures
    }
    rows = tuple(_row(measure, outcomes) for measure in scenario.measures)
    return Summary(scenario, rows, failures)


def _row(measure: Measure, outcomes: Outcomes) -> Row:
    statistics = {
        side: _statistic(samples)
        for side, outcome in outcomes.items()
        if (samples := outcome.samples.get(measure.key))
    }
    medians = {side: statistic.median for side, statistic in statistics.items()}
    return Row(measure, statistics, tuple(_verdict(goal, medians) for goal in measure.goals))


def _statistic(samples: list[float]) -> Statistic:
    return Statistic(median(samples), min(samples), max(samples), len(samples))


def _verdict(goal: Goal, medians: Mapping[Side, float]) -> Verdict:
    value = goal.value(medians)
    return Verdict(goal, value, None if value is None else goal.is_met(value))
