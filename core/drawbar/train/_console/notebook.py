"""Show a run as a card in a notebook that is updated in place.

The card uses IPython's display handle. rich would need ipywidgets and convert each line to HTML.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from drawbar.train._console.display_status import DisplayStatus
from drawbar.train._console.displays import OutputStreams, PlainDisplay
from drawbar.train._history.html import MAX_CURVE_POINTS, RunCard, iter_numbers
from drawbar.train._protocol.output_lines import StreamName

_DRAW_PERIOD_S = 0.5


class NotebookDisplay(PlainDisplay):
    """Card with state, metrics, curves, and checkpoints in the cell's output, above plain lines.

    Args:
        streams: Output streams.
        status: Status to show.
    """

    def __init__(self, streams: OutputStreams, status: DisplayStatus) -> None:
        from IPython import display

        super().__init__(streams, status)
        self._curves = CurveBuffer()
        self._last_drawn = time.monotonic()
        make_handle: Any = display.DisplayHandle  # has no types
        self._handle = make_handle()
        self._handle.display(self._render(), raw=True)

    def _render(self) -> dict[str, str]:
        status = self._status
        card = RunCard(
            title=os.path.basename(status.path.rstrip("/")),
            status=" | ".join(
                filter(
                    None,
                    (
                        status.format_activity(),
                        status.format_elapsed(),
                        status.format_progress(),
                        status.redrawn_line,
                    ),
                )
            ),
            path=status.path,
            metrics=status.last_report[1] if status.last_report else {},
            curves=self._curves.points,
            checkpoints=list(status.checkpoints.items()),
        )
        return {"text/plain": status.format_line(), "text/html": card.render()}

    def on_state_change(self) -> None:
        """Draw the card."""
        self._last_drawn = time.monotonic()
        self._handle.update(self._render(), raw=True)

    def on_report(self) -> None:
        """Add the report to the curves and draw the card if it is due."""
        if self._status.last_report is not None:
            self._curves.add(*self._status.last_report)
        self._draw_if_due()

    def on_redraw(self, text: str, stream: StreamName) -> None:
        """Draw the card if it is due."""
        self._draw_if_due()

    def _draw_if_due(self) -> None:
        if time.monotonic() - self._last_drawn >= _DRAW_PERIOD_S:
            self.on_state_change()

    on_commit = close = on_state_change


class CurveBuffer:
    """Metrics of rank 0 as curves. Old points are thinned out, so that their number is bounded.

    Attributes:
        points: For each metric, its value by report index.
    """

    def __init__(self) -> None:
        self.points: dict[str, dict[int, float]] = {}
        self._stride = 1

    def add(self, index: int, metrics: Mapping[str, object]) -> None:
        """Add the numbers of report `index`."""
        if index % self._stride:
            return
        for name, value in iter_numbers(metrics):
            self.points.setdefault(name, {})[index] = value
        if max(map(len, self.points.values()), default=0) > 2 * MAX_CURVE_POINTS:
            self._stride *= 2
            for points in self.points.values():
                for surplus_index in [index for index in points if index % self._stride]:
                    del points[surplus_index]
