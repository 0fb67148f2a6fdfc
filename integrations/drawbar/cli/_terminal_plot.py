"""Curves in characters: one line of blocks, or a canvas of Braille dots, 2 by 4 in each cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from drawbar.cli._output import format_value

_BLOCKS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_EMPTY = 0x2800
_AXIS = " ┤"
_LEAST_WIDTH = 8
_MOST_COLUMNS = 120


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw values as one line of blocks; "" if there are fewer than two."""
    if len(values) < 2:
        return ""
    step = max(1, -(-len(values) // width))
    kept = list(values)[::-step][::-1]  # the last one always
    low, high, most = min(kept), max(kept), len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(most * _normalize(value, low, high))] for value in kept)


def draw_curve(points: Mapping[int, float], columns: int, height: int = 12) -> list[str]:
    """Draw a curve as lines of text, with the lowest and highest value beside it."""
    first, last = min(points), max(points)
    low, high = min(points.values()), max(points.values())
    labels = [format_value(high), *[""] * (height - 2), format_value(low)]
    edge = max(map(len, labels))
    width = max(_LEAST_WIDTH, min(columns, _MOST_COLUMNS) - edge - len(_AXIS))
    cells = [[_EMPTY] * width for _ in range(height)]
    across = (2 * width - 1) / max(last - first, 1)
    up = 4 * height - 1
    dots = [
        ((x - first) * across, up * _normalize(y, low, high)) for x, y in sorted(points.items())
    ]
    for column, value in _interpolate(dots):
        row = 4 * height - 1 - round(value)
        cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    lines = [
        f"{label:>{edge}}{_AXIS}{''.join(map(chr, row))}"
        for label, row in zip(labels, cells, strict=True)
    ]
    reports = f"{first}{str(last).rjust(width - len(str(first)))}"
    return [*lines, " " * (edge + len(_AXIS)) + reports]


def _normalize(value: float, low: float, high: float) -> float:
    """Say where a value lies between two, from 0 to 1; of halves, since a difference may be inf."""
    half = high / 2 - low / 2
    return (value / 2 - low / 2) / half if half > 0 else 0.0


def _interpolate(dots: Sequence[tuple[float, float]]) -> Iterator[tuple[int, float]]:
    """Give the dots, and those on the straight lines between them, by whole columns."""
    yield round(dots[0][0]), dots[0][1]
    for (left, below), (right, above) in pairwise(dots):
        steps = max(1, round(right - left), round(abs(above - below)))
        for step in range(1, steps + 1):
            part = step / steps
            yield round(left + (right - left) * part), below + (above - below) * part
