"""Measure the controller with up to 4,096 ranks, and compare it with the goals.

    python -m benchmarks scale

The controller is the real one. The ranks are simulated (`_simulated_ranks.py`), in a thread whose
time is not counted. 16 Ray actors show the cost of Ray's transport.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks._cluster import fresh_cluster
from benchmarks._scale_run import (
    ControllerCost,
    RayCost,
    measure_controller,
    measure_memory_growth,
    measure_ray,
)

SIZES = (8, 64, 512, 4096)
REPORT_SECONDS = 10.0
"""Time between two reports of a rank, for the share of a core that the reports of all ranks use."""

RAY_ACTORS = 16
RAY_RATE = 500.0
RAY_SECONDS = 10.0


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        label: Measured value.
        unit: Unit of the value.
        values: Value of each size, or a single one that does not depend on the size.
        at_most: Upper bound for the last value; None if there is no goal.
    """

    label: str
    unit: str
    values: Sequence[float]
    at_most: float | None = None

    def format(self) -> list[str]:
        """Return the cells of the row."""
        values = [f"{value:.3g} {self.unit}" for value in self.values]
        cells = [""] * (len(SIZES) - len(values)) + values
        if self.at_most is None:
            return [self.label, *cells, "", ""]
        is_met = self.values[-1] <= self.at_most
        return [self.label, *cells, f"<= {self.at_most:g} {self.unit}", "yes" if is_met else "no"]


def make_rows(
    costs: Sequence[ControllerCost], growth: float | None, ray: RayCost | None
) -> list[Row]:
    """Return the rows for the measured costs."""

    def scale(value: Callable[[ControllerCost], float], factor: float) -> list[float]:
        return [value(cost) * factor for cost in costs]

    rows = [
        Row("start, to the first line on the last rank", "s", scale(lambda c: c.start, 1), 5),
        Row("barrier, CPU", "ms", scale(lambda c: c.barrier, 1e3), 20),
        Row("report, CPU", "us", scale(lambda c: c.report, 1e6), 60),
        Row("reports each 10 s, share of a core", "%", scale(_compute_share, 100), 50),
        Row("checkpoint, last report to commit", "s", scale(lambda c: c.checkpoint, 1), 1),
        Row("checkpoint, CPU", "ms", scale(lambda c: c.checkpoint_work, 1e3)),
        Row(
            "checkpoint of user directories, to commit",
            "s",
            scale(lambda c: c.persisted_checkpoint, 1),
        ),
        Row("death, to the next first line on the last rank", "s", scale(lambda c: c.restart, 1)),
    ]
    if growth is not None:
        rows.append(Row("memory growth in 10 minutes", "MB", [growth], 1))
    if ray is not None:
        label = f"{RAY_ACTORS} Ray actors, {ray.rate:.0f} reports/s:"
        rows.append(Row(f"{label} controller CPU per report", "us", [ray.thread * 1e6], 60))
        rows.append(Row(f"{label} driver CPU per report", "us", [ray.process * 1e6]))
    return rows


def _compute_share(cost: ControllerCost) -> float:
    return cost.report * cost.num_ranks / REPORT_SECONDS


def make_table(rows: Sequence[Row]) -> Table:
    """Return the table of goals and measured values."""
    table = Table("", *[f"{size:,} ranks" for size in SIZES], "goal", "met")
    for row in rows:
        table.add_row(*row.format())
    return table


def main(arguments: Sequence[str]) -> None:
    """Run the command `python -m benchmarks scale`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__)
    parser.add_argument("--no-ray", action="store_true", help="skip the Ray actors")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    costs = []
    for size in SIZES:
        costs.append(measure_controller(size))
        console.print(f"{size} ranks measured", style="dim")
    growth = measure_memory_growth(SIZES[-1])
    ray = None
    if not options.no_ray:
        with fresh_cluster(RAY_ACTORS):
            ray = measure_ray(RAY_ACTORS, RAY_RATE, RAY_SECONDS)
    wide = console if console.is_terminal else Console(highlight=False, width=140)
    wide.print(make_table(make_rows(costs, growth, ray)))
