"""How a run looks in a notebook: its state, metrics, their curves and checkpoints.

One static piece of HTML in the colours of the page around it; nothing is loaded and no script runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from drawbar.train._history.events import ReportReceived
from drawbar.train._metrics import flatten

MAX_CURVES = 12
"""Of so many metrics the curve is drawn."""
MAX_CURVE_POINTS = 200
"""A curve has so many points at the most: it is not wider in pixels."""

_WIDTH, _HEIGHT, _MARGIN = 180, 48, 3


@dataclass(frozen=True, kw_only=True)
class RunCard:
    """What is shown of a run.

    Attributes:
        title: Its name.
        status: Such as "finished".
        path: Where it lies.
        error: Why it failed, or "".
        metrics: The last ones.
        curves: Of each metric, its values in the order of the reports, by number of the report.
        checkpoints: Those that are kept, by name, with their metrics.
    """

    title: str
    status: str
    path: str
    error: str = ""
    metrics: Mapping[str, object] = field(default_factory=dict)
    curves: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    checkpoints: Sequence[tuple[str, Mapping[str, object]]] = ()

    def render(self) -> str:
        """Write it."""
        parts = [
            f"<b>{escape(self.title)}</b> {escape(self.status)}<br><code>{escape(self.path)}</code>"
        ]
        if self.error:
            parts.append(f"<pre>{escape(self.error)}</pre>")
        drawn = {name: points for name, points in self.curves.items() if len(points) > 1}
        lasts = {name: points[max(points)] for name, points in self.curves.items()}
        values = {**lasts, **flatten(self.metrics)}
        rows = [
            (
                name,
                _format_number(value),
                _render_curve(drawn[name]) if name in list(drawn)[:MAX_CURVES] else "",
            )
            for name, value in values.items()
        ]
        if rows:
            parts.append(_render_table(rows))
        if self.checkpoints:
            parts.append(_render_table(_make_checkpoint_rows(self.checkpoints)))
        return f'<div style="line-height: 1.5">{"".join(parts)}</div>'


def extract_curves(reports: Iterable[ReportReceived]) -> dict[str, dict[int, float]]:
    """Give the numbers that the lowest rank has reported, by metric and number of the report."""
    found: dict[str, dict[int, float]] = {}
    made = list(reports)
    lowest = min((report.rank for report in made), default=0)
    for report in made:
        if report.rank != lowest:
            continue
        for name, value in iter_numbers(report.metrics):
            found.setdefault(name, {})[report.index] = value
    return found


def iter_numbers(metrics: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Give the metrics that have a curve, nested keys joined with "/"."""
    for name, value in flatten(metrics).items():
        if _is_number(value):
            yield name, float(value)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # not NaN, and no integer that no float can be


def _make_checkpoint_rows(
    checkpoints: Sequence[tuple[str, Mapping[str, object]]],
) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for name, metrics in reversed(checkpoints):
        values = ", ".join(
            f"{key} {_format_number(value)}" for key, value in flatten(metrics).items()
        )
        rows.append((name, values))
    return rows


class _SafeHtml(str):
    """HTML of our own, rather than text."""


def _render_table(rows: Sequence[Sequence[str]]) -> str:
    cells = ["".join(map(_render_cell, row)) for row in rows]
    return f"<table>{''.join(f'<tr>{each}</tr>' for each in cells)}</table>"


def _render_cell(text: str) -> str:
    shown = text if isinstance(text, _SafeHtml) else escape(text)
    return f'<td style="text-align: left">{shown}</td>'


def _format_number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _render_curve(points: Mapping[int, float]) -> _SafeHtml:
    """Draw a curve with its lowest and highest value."""
    step = -(-len(points) // MAX_CURVE_POINTS)
    kept = sorted(points.items())
    # With the last one, which says where the run stands.
    kept = [*kept[::step], kept[-1]]
    first, last = kept[0][0], kept[-1][0]
    low, high = min(points.values()), max(points.values())
    across = (_WIDTH - 2 * _MARGIN) / max(last - first, 1)
    up = (_HEIGHT - 2 * _MARGIN) / (high - low) if high > low else 0.0
    line = " ".join(
        f"{_MARGIN + (x - first) * across:.1f},{_HEIGHT - _MARGIN - (y - low) * up:.1f}"
        for x, y in kept
    )
    described = f"from {_format_number(low)} to {_format_number(high)}, reports {first} to {last}"
    return _SafeHtml(
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img"><title>{described}</title>'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )
