"""Draw curves with Unicode block and Braille characters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from drawbar.cli._output import format_value

_BLOCKS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_EMPTY = 0x2800
_AXIS = " ┤"
_MIN_WIDTH = 8
_MAX_COLUMNS = 120


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw values as one line of block characters. Returns "" for fewer than two values."""
    if len(values) < 2:
        return ""
    step = max(1, -(-len(values) // width))
    samples = list(values)[::-step][::-1]  # always includes the last value
    low, high, max_index = min(samples), max(samples), len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(max_index * _normalize(value, low, high))] for value in samples)


def draw_curve(points: Mapping[int, float], columns: int, height: int = 12) -> list[str]:
    """Draw a curve with Braille dots (2 x 4 per character), with its minimum and maximum."""
    first, last = min(points), max(points)
    low, high = min(points.values()), max(points.values())
    labels = [format_value(high), *[""] * (height - 2), format_value(low)]
    edge = max(map(len, labels))
    width = max(_MIN_WIDTH, min(columns, _MAX_COLUMNS) - edge - len(_AXIS))
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
    """Map a value to the range from 0 (low) to 1 (high)."""
    half = high / 2 - low / 2  # high - low may overflow to infinity
    return (value / 2 - low / 2) / half if half > 0 else 0.0


def _interpolate(dots: Sequence[tuple[float, float]]) -> Iterator[tuple[int, float]]:
    """Yield the dots, and the dots on the lines between them, with integer columns."""
    yield round(dots[0][0]), dots[0][1]
    for (left, below), (right, above) in pairwise(dots):
        steps = max(1, round(right - left), round(abs(above - below)))
        for step in range(1, steps + 1):
            fraction = step / steps
            yield round(left + (right - left) * fraction), below + (above - below) * fraction
