"""Curves in characters: one line of blocks, or a canvas of Braille dots, 2 by 4 in each cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from drawbar.cli._output import number

_BLOCKS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_EMPTY = 0x2800


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw values as one line of blocks; "" if there are fewer than two."""
    if len(values) < 2:
        return ""
    step = max(1, -(-len(values) // width))
    kept = list(values)[::-step][::-1]  # the last one always
    low, high = min(kept), max(kept)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in kept)


def canvas(points: Mapping[int, float], *, width: int = 64, height: int = 12) -> list[str]:
    """Draw a curve as lines of text, with the lowest and highest value beside it."""
    cells = [[_EMPTY] * width for _ in range(height)]
    first, last = min(points), max(points)
    low, high = min(points.values()), max(points.values())
    across = (2 * width - 1) / max(last - first, 1)
    up = (4 * height - 1) / (high - low) if high > low else 0.0
    dots = [((x - first) * across, (y - low) * up) for x, y in sorted(points.items())]
    for column, value in _joined(dots):
        row = 4 * height - 1 - round(value)
        cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    labels = [number(high), *[""] * (height - 2), number(low)]
    edge = max(map(len, labels))
    lines = [
        f"{label:>{edge}} ┤{''.join(map(chr, row))}"
        for label, row in zip(labels, cells, strict=True)
    ]
    return [*lines, f"{'':>{edge}}  {first}{last:>{width - len(str(first))}}"]


def _joined(dots: Sequence[tuple[float, float]]) -> Iterator[tuple[int, float]]:
    """Give the dots, and those on the straight lines between them, by whole columns."""
    yield round(dots[0][0]), dots[0][1]
    for (left, below), (right, above) in pairwise(dots):
        steps = max(1, round(right - left), round(abs(above - below)))
        for step in range(1, steps + 1):
            part = step / steps
            yield round(left + (right - left) * part), below + (above - below) * part
