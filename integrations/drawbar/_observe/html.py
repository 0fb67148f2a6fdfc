"""Render a run as a static HTML card for notebooks.

The card has no scripts, loads nothing, and uses the colors of the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from drawbar._base.metrics import flatten
from drawbar._history.run_history import RunHistory

MAX_CURVES = 12
"""Maximum number of metrics for which curves are drawn."""
MAX_CURVE_POINTS = 200
"""Maximum number of points in a curve, which is about its width in pixels."""

_WIDTH, _HEIGHT, _MARGIN = 180, 48, 3


@dataclass(frozen=True, kw_only=True)
class RunCard:
    """Content of the card of a run.

    Attributes:
        title: Name of the run.
        status: Status, such as "finished".
        path: Path or URI of the run.
        error: Error of a failed run, or "".
        metrics: Last metrics.
        curves: For each metric, its value by report number.
        checkpoints: Name and metrics of each checkpoint.
    """

    title: str
    status: str
    path: str
    error: str = ""
    metrics: Mapping[str, object] = field(default_factory=dict)
    curves: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    checkpoints: Sequence[tuple[str, Mapping[str, object]]] = ()

    def render(self) -> str:
        """Return the card as HTML."""
        parts = [
            f"<b>{escape(self.title)}</b> {escape(self.status)}<br><code>{escape(self.path)}</code>"
        ]
        if self.error:
            parts.append(f"<pre>{escape(self.error)}</pre>")
        curves = {name: points for name, points in self.curves.items() if len(points) > 1}
        last_values = {name: points[max(points)] for name, points in self.curves.items()}
        values = {**last_values, **flatten(self.metrics)}
        rows = [
            (
                name,
                _format_number(value),
                _render_curve(curves[name]) if name in list(curves)[:MAX_CURVES] else "",
            )
            for name, value in values.items()
        ]
        if rows:
            parts.append(_render_table(rows))
        if self.checkpoints:
            parts.append(_render_table(_make_checkpoint_rows(self.checkpoints)))
        return f'<div style="line-height: 1.5">{"".join(parts)}</div>'


def extract_curves(history: RunHistory, *, is_sampled: bool) -> dict[str, dict[int, float]]:
    """Return the numeric metrics of the lowest rank, by metric and report number.

    Args:
        history: History of the run.
        is_sampled: Whether to return only some points of a long run, so that few segments are read.
    """
    blocks = (
        history.iter_sampled_blocks()
        if is_sampled
        else (block for _, block in history.iter_blocks(history.lowest_rank))
    )
    curves: dict[str, dict[int, float]] = {}
    for block in blocks:
        for metric, values in block.metrics.items():
            for index, value in zip(block.indices, values, strict=True):
                for name, number in iter_numbers({metric: value}):
                    curves.setdefault(name, {})[index] = number
    for index, metrics in history.validation_metrics.items():
        for name, number in iter_numbers(metrics):
            curves.setdefault(name, {})[index] = number
    return {name: dict(sorted(points.items())) for name, points in curves.items()}


def iter_numbers(metrics: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield the finite numeric metrics, with nested keys joined by "/"."""
    for name, value in flatten(metrics).items():
        if _is_number(value):
            yield name, float(value)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # False for NaN and for integers that are too large


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
    """HTML that must not be escaped."""


def _render_table(rows: Sequence[Sequence[str]]) -> str:
    cells = ["".join(map(_render_cell, row)) for row in rows]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _render_cell(text: str) -> str:
    content = text if isinstance(text, _SafeHtml) else escape(text)
    return f'<td style="text-align: left">{content}</td>'


def _format_number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _render_curve(points: Mapping[int, float]) -> _SafeHtml:
    """Draw a curve with its lowest and highest value in the title."""
    step = -(-len(points) // MAX_CURVE_POINTS)
    drawn = sorted(points.items())
    # Always include the last point, which is the current value.
    drawn = [*drawn[::step], drawn[-1]]
    first, last = drawn[0][0], drawn[-1][0]
    low, high = min(points.values()), max(points.values())
    x_scale = (_WIDTH - 2 * _MARGIN) / max(last - first, 1)
    y_scale = (_HEIGHT - 2 * _MARGIN) / (high - low) if high > low else 0.0
    line = " ".join(
        f"{_MARGIN + (x - first) * x_scale:.1f},{_HEIGHT - _MARGIN - (y - low) * y_scale:.1f}"
        for x, y in drawn
    )
    title = f"from {_format_number(low)} to {_format_number(high)}, reports {first} to {last}"
    return _SafeHtml(
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img"><title>{title}</title>'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )
