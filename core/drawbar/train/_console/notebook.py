"""How a run looks in a notebook while it goes: state, metrics, curves and checkpoints in one place.

Made with IPython's display handle: rich would need ipywidgets, and turn each line into HTML.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from drawbar.train._console.views import PlainView, Status, Streams
from drawbar.train._history.html import POINTS, Card, numbers_of
from drawbar.train._lines import StreamName

_PERIOD_S = 0.5


class NotebookView(PlainView):
    """A card in the cell's output that is updated in place, and plain lines below it."""

    def __init__(self, streams: Streams, status: Status) -> None:
        from IPython import display

        super().__init__(streams, status)
        self._curves = Curves()
        self._drawn_at = time.monotonic()
        make_handle: Any = display.DisplayHandle  # has no types
        self._handle = make_handle()
        self._handle.display(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        status = self._status
        card = Card(
            title=os.path.basename(status.path.rstrip("/")),
            status=" | ".join(filter(None, (status.activity(), status.elapsed(), status.redrawn))),
            path=status.path,
            metrics=status.report[1] if status.report else {},
            curves=self._curves.points,
            checkpoints=list(status.checkpoints.items()),
        )
        return {"text/plain": status.one_line(), "text/html": card.html()}

    def state_changed(self) -> None:
        self._drawn_at = time.monotonic()
        self._handle.update(self._content(), raw=True)

    def reported(self) -> None:
        if self._status.report is not None:
            self._curves.add(*self._status.report)
        self._draw_sometimes()

    def redrawn(self, text: str, stream: StreamName) -> None:
        self._draw_sometimes()

    def _draw_sometimes(self) -> None:
        if time.monotonic() - self._drawn_at >= _PERIOD_S:
            self.state_changed()

    committed = close = state_changed


class Curves:
    """What rank 0 has reported, thinned as it grows: it is drawn on few pixels, again and again."""

    def __init__(self) -> None:
        self.points: dict[str, dict[int, float]] = {}
        self._step = 1

    def add(self, index: int, metrics: Mapping[str, object]) -> None:
        """Take the numbers of report `index`."""
        if index % self._step:
            return
        for name, value in numbers_of(metrics):
            self.points.setdefault(name, {})[index] = value
        if max(map(len, self.points.values()), default=0) > 2 * POINTS:
            self._step *= 2
            for points in self.points.values():
                for each in [index for index in points if index % self._step]:
                    del points[each]
