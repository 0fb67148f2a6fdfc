"""Scenarios: systems that do the same work, their measures, and goals.

This module and the scenario files do not import Ray or a framework at module level, since workers
import these files too, which would distort measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

Side = Literal["drawbar", "ray.train", "dask", "bare"]
SIDES: tuple[Side, ...] = get_args(Side)

Samples = dict[str, list[float]]
"""Samples of one driver: key of a `Measure` to its samples, in the unit of the measure."""


class Answer(TypedDict, total=False):
    """Result of a driver process: samples or an error."""

    samples: Samples
    error: str


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A ratio of two sides' medians, or one side's median as it is, and the bound it should keep.

    Args:
        over: The side whose median is divided.
        under: The side it is divided by. None: `over`'s median itself is compared with the bound.
        at_least: Lower bound. With neither bound the ratio is shown for information.
        at_most: Upper bound.
    """

    over: Side
    under: Side | None = None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def label(self) -> str:
        """The quantity in words, such as "ray.train / drawbar"."""
        return self.over if self.under is None else f"{self.over} / {self.under}"

    @property
    def target(self) -> str:
        """The bound in words, such as "≥ 6"; "" if there is none."""
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "" if self.at_most is None else f"≤ {self.at_most:g}"

    def value(self, medians: Mapping[Side, float]) -> float | None:
        """Compute the quantity; None if a side has no median or the divisor is zero."""
        over = medians.get(self.over)
        if over is None or self.under is None:
            return over
        under = medians.get(self.under)
        return over / under if under else None

    def is_met(self, value: float) -> bool | None:
        """Return whether a value is within the bound; None if there is no bound."""
        if self.at_least is not None:
            return value >= self.at_least
        return None if self.at_most is None else value <= self.at_most


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One row of the table.

    Args:
        key: Its name in `Samples` and in the JSON file.
        label: Its name in the table.
        unit: "s" (shown as s, ms or µs), "1/s", or "" for a plain number.
        goals: Ratios to show with the measure.
        sides: Who measures it, where not every side does.
    """

    key: str
    label: str
    unit: Literal["s", "1/s", ""] = "s"
    goals: tuple[Goal, ...] = ()
    sides: tuple[Side, ...] = SIDES


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One piece of work that several sides do.

    Args:
        name: Short name for `--only`.
        title: Description of the measurement, in one line.
        note: What "bare" is here, and what else a reader of the numbers must know.
        measures: The rows.
        sides: Who does it. Each is called in a fresh process, so that no two Ray clusters coexist.
        timeout: Seconds until a side's process is ended and shown as failed.
    """

    name: str
    title: str
    note: str
    measures: tuple[Measure, ...]
    sides: Mapping[Side, Callable[[], Samples]]
    timeout: float = 180.0


def faster_than_ray_train(at_least: float | None = None) -> Goal:
    """Return the goal for the time of `ray.train` divided by that for Drawbar."""
    return Goal(over="ray.train", under="drawbar", at_least=at_least)


def cost_over_bare(at_most: float | None = None) -> Goal:
    """Return the goal for the time of Drawbar divided by that for bare processes."""
    return Goal(over="drawbar", under="bare", at_most=at_most)
