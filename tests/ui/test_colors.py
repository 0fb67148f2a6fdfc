"""The colours of the pages can be distinguished: WCAG 2.2, success criteria 1.4.3 and 1.4.11."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drawbar import ui

COLOR = re.compile(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)")
CSS = (Path(ui.__file__).parent / "_static" / "app.css").read_text()
PAIRS = [
    *(
        (text, surface, 4.5)
        for text in ("text", "muted")
        for surface in ("bg", "panel", "bad-soft")
    ),
    *(("text", surface, 4.5) for surface in ("accent-soft", "mark")),
    ("muted", "accent-soft", 4.5),
    *((text, "panel", 4.5) for text in ("accent", "ok", "warn", "bad")),
    *((f"c{number}", "panel", 4.5) for number in range(8)),
    *((shape, "panel", 3.0) for shape in ("control", "faint", "lost", "wait")),
]


def get_luminance(color: str) -> float:
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("front", "back", "ratio"), PAIRS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colors_have_contrast(front: str, back: str, ratio: float, theme: str) -> None:
    colors = {name: light if theme == "light" else dark for name, light, dark in COLOR.findall(CSS)}
    dark, bright = sorted(get_luminance(colors[name]) for name in (front, back))
    assert (bright + 0.05) / (dark + 0.05) >= ratio
