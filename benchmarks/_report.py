"""Show summaries: one rich table on the console, the same as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from benchmarks._scenario import SIDES, Measure, Side
from benchmarks._summary import Row, Summary, Verdict

CAPTION = "median (min - max in the same unit, number of samples); for /s more is better"
HEADER = ("measure", *SIDES, "ratio", "goal")


def as_table(summaries: Sequence[Summary]) -> Table:
    """Draw everything as one rich table, a section per scenario."""
    table = Table(
        title="Drawbar, ray.train and bare processes, side by side",
        caption=CAPTION,
        box=box.SIMPLE_HEAD,
    )
    for name in HEADER:
        aligned: JustifyMethod = "left" if name in ("measure", "goal") else "right"
        table.add_column(name, justify=aligned, no_wrap=name in ("ratio", "goal"))
    for summary in summaries:
        table.add_row(f"[bold cyan]{summary.scenario.name}[/]  {summary.scenario.title}")
        for row in summary.rows:
            table.add_row(*_cells(row, summary, _rich_mark))
        table.add_section()
    return table


def as_markdown(summaries: Sequence[Summary], machine: Mapping[str, str]) -> str:
    """Write everything as a Markdown page: the machine, then a table per scenario with its note."""
    lines = ["# Benchmark results", "", *(f"- {key}: {text}" for key, text in machine.items())]
    lines += ["", CAPTION]
    for summary in summaries:
        lines += ["", f"## {summary.scenario.name}: {summary.scenario.title}", ""]
        lines += [summary.scenario.note, "", _line(HEADER), _line(["---"] * len(HEADER))]
        for row in summary.rows:
            cells = _cells(row, summary, _plain_mark)
            lines.append(_line([cell.replace("\n", "<br>") for cell in cells]))
        if summary.failures:
            lines += ["", *(f"- {side}: {text}" for side, text in summary.failures.items())]
    return "\n".join(lines) + "\n"


def as_json(summaries: Sequence[Summary], machine: Mapping[str, str]) -> str:
    """Write everything as JSON; times in seconds."""
    document = {"machine": dict(machine), "scenarios": [_as_plain(item) for item in summaries]}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row, summary: Summary, mark: Callable[[Verdict], str]) -> list[str]:
    measured = [_statistic(row, summary, side) for side in SIDES]
    ratios = [_ratio(verdict, row.measure) for verdict in row.verdicts]
    goals = [mark(verdict) for verdict in row.verdicts]
    return [row.measure.label, *measured, "\n".join(ratios), "\n".join(goals).rstrip()]


def _statistic(row: Row, summary: Summary, side: Side) -> str:
    statistic = row.statistics.get(side)
    if statistic is None:
        return "failed" if side in summary.failures and side in row.measure.sides else "-"
    size, unit = _scale(statistic.median, row.measure)
    middle, low, high = (
        _digits(value / size) for value in (statistic.median, statistic.low, statistic.high)
    )
    if statistic.count == 1:
        return f"{middle}{unit}\n(n=1)"
    return f"{middle}{unit}\n({low} - {high}, n={statistic.count})"


def _scale(value: float, measure: Measure) -> tuple[float, str]:
    """Return the most readable unit for a value: its size and its name."""
    if measure.unit != "s":
        return 1.0, "/s" if measure.unit else ""
    scales = ((1.0, " s"), (1e-3, " ms"), (1e-6, " µs"))
    return next((scale for scale in scales if value >= scale[0]), (1e-9, " ns"))


def _ratio(verdict: Verdict, measure: Measure) -> str:
    if verdict.value is None:
        return f"{verdict.goal.label}: -"
    if verdict.goal.under is None:
        size, unit = _scale(verdict.value, measure)
        return f"{verdict.goal.label}: {_digits(verdict.value / size)}{unit}"
    return f"{verdict.goal.label}: {_digits(verdict.value)}x"


def _digits(value: float) -> str:
    """Three digits, and never an exponent: 0.123, 1.20, 12.3, 123, 1,234."""
    if value == int(value) and value < 1000:
        return f"{value:.0f}"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def _plain_mark(verdict: Verdict) -> str:
    words = {True: " met", False: " MISSED", None: ""}
    return verdict.goal.target + words[verdict.met]


def _rich_mark(verdict: Verdict) -> str:
    colour = {True: "green", False: "bold red", None: "dim"}[verdict.met]
    return f"[{colour}]{_plain_mark(verdict)}[/]"


def _as_plain(summary: Summary) -> dict[str, Any]:
    return {
        "name": summary.scenario.name,
        "title": summary.scenario.title,
        "note": summary.scenario.note,
        "failures": dict(summary.failures),
        "measures": [_row_as_plain(row) for row in summary.rows],
    }


def _row_as_plain(row: Row) -> dict[str, Any]:
    return {
        "key": row.measure.key,
        "label": row.measure.label,
        "unit": row.measure.unit,
        "sides": {
            side: {
                "median": statistic.median,
                "min": statistic.low,
                "max": statistic.high,
                "samples": statistic.count,
            }
            for side, statistic in row.statistics.items()
        },
        "goals": [
            {
                "ratio": verdict.goal.label,
                "value": verdict.value,
                "target": verdict.goal.target,
                "met": verdict.met,
            }
            for verdict in row.verdicts
        ],
    }
