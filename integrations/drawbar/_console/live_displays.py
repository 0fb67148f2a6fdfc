"""Displays that are updated in place: a line in a terminal, and a card in a notebook.

rich draws the line. The card uses IPython's display handle, because rich would need ipywidgets in a
notebook, and convert each line to HTML.
"""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from drawbar._console.displays import DisplayStatus, OutputStreams, PlainDisplay
from drawbar._observe.html import MAX_CURVE_POINTS, RunCard, iter_numbers
from drawbar._process.output_lines import LineSplitter, OutputLine, StreamName

if TYPE_CHECKING:
    from rich.console import RenderHook

_DRAW_PERIOD_S = 0.5


def _make_cursor_hook() -> RenderHook:
    """Return a hook that leaves the cursor at the start of the live line and erases from there.

    rich leaves the cursor at the end of the line. A terminal that becomes narrower wraps the line,
    and rich would erase only its last part. The number of parts is unknown, because some terminals
    truncate the line instead, but all of them keep the cursor at its character. The lines below are
    erased from the second column on: tmux interprets erasing from the first column of the screen as
    `clear`, and saves the content to its history.
    """
    from rich.console import ConsoleRenderable, RenderHook
    from rich.control import Control
    from rich.segment import ControlType, Segment, Segments

    carriage_return = Control(ControlType.CARRIAGE_RETURN)
    erase = Segment("\r\x1b[2K\x1b[C\x1b[J\r", None, [(ControlType.CARRIAGE_RETURN,)])

    class _CursorHook(RenderHook):
        def process_renderables(
            self, renderables: list[ConsoleRenderable]
        ) -> list[ConsoleRenderable]:
            return [Segments([erase]), *renderables, carriage_return]

    return _CursorHook()


class TerminalDisplay:
    """One live line at the bottom of the terminal, redrawn by rich four times per second.

    Output to a stream that is not a terminal (`python train.py > out.txt`) is not changed.

    Args:
        streams: Output streams.
        status: Status to show.
        file: Terminal of the live line. Default: stderr.
    """

    def __init__(self, streams: OutputStreams, status: DisplayStatus, file: TextIO | None) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live
        from rich.text import Text

        def draw() -> Text:
            return Text(status.format_line(), no_wrap=True, overflow="ellipsis")

        self._streams = streams
        self._status = status
        names: tuple[StreamName, ...] = ("stdout", "stderr")
        self._splitters = {name: LineSplitter(name, self._show_line) for name in names}
        self._decoders = {
            name: codecs.getincrementaldecoder("utf-8")("backslashreplace") for name in names
        }
        self._live = Live(
            console=RichConsole(file=file, stderr=True),
            get_renderable=draw,
            transient=True,
            redirect_stdout=file is None and streams.get_stream("stdout").isatty(),
            redirect_stderr=file is None,
        )
        self._live.start()
        self._live.console.push_render_hook(_make_cursor_hook())

    def print_line(self, text: str) -> None:
        """Print a line of Drawbar above the live line."""
        self._print_above(f"[drawbar {self._status.format_elapsed()}] {text}")

    def print_user_line(self, text: str, stream: StreamName) -> None:
        """Print a line of the training function above the live line."""
        if self._streams.get_stream(stream).isatty():
            self._print_above(text)
        else:
            self._streams.write_line(stream, text)

    def write_user_bytes(self, data: bytes, stream: StreamName) -> None:
        """Print complete lines of a program's output above the live line."""
        if self._streams.get_stream(stream).isatty():
            self._splitters[stream].feed(self._decoders[stream].decode(data))
        else:
            self._streams.write(stream, data)

    def _show_line(self, line: OutputLine) -> None:
        self._status.redrawn_line = line.text if line.is_redraw else ""
        if not line.is_redraw:
            self._print_above(line.text)

    def _print_above(self, text: str) -> None:
        self._live.console.out(text, highlight=False)

    def on_redraw(self, text: str, stream: StreamName) -> None:
        """Do nothing: rich redraws the live line periodically."""

    def on_state_change(self) -> None:
        """Do nothing: rich redraws the live line periodically."""

    on_report = on_commit = on_state_change

    def close(self) -> None:
        """Print unfinished lines and replace the live line with a last plain one."""
        for splitter in self._splitters.values():
            splitter.finish()
        self._live.refresh()
        # Remove our hook first, because `stop()` removes the last hook and expects it to be rich's.
        self._live.console.pop_render_hook()
        self._live.stop()
        self._streams.write_line("stderr", self._status.format_line())


class NotebookDisplay(PlainDisplay):
    """Card with status, metrics, curves, and checkpoints in the cell's output, above plain lines.

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
