"""What a run shows in the driver. It only watches: no method waits, and none raises.

On a terminal and in a notebook the run is one live line, which the user's own lines pass above.
Elsewhere (a log file, CI) it is plain lines, few enough to read: metrics, checkpoints and redrawn
progress bars at most every 10 s. Both are a `_View`; `Console` decides what is worth showing.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TextIO, TypeVar

from drawbar.train._errors import WorkerFailure
from drawbar.train._messages import Printed

_PLAIN_PERIOD_S = 10.0
_NOTEBOOK_PERIOD_S = 0.25
_MAX_METRICS = 6

_P = ParamSpec("_P")
_T = TypeVar("_T")
StreamName = Literal["stdout", "stderr"]

logger = logging.getLogger(__name__)


def _watches(
    method: Callable[Concatenate[_T, _P], None],
) -> Callable[Concatenate[_T, _P], None]:
    """Keep a failure to show something, such as a closed stdout, from ending the run."""

    @functools.wraps(method)
    def safe(self: _T, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            logger.debug("%s could not be shown", method.__name__, exc_info=True)

    return safe


class Console:
    """Shows one run. Thread safe; every method is cheap and none raises.

    Args:
        level: A `logging` level. INFO shows everything; WARNING the output of rank 0, the errors of
            the others, notices and failures; ERROR failures and errors only.
        run_path: The run directory.
        file: Write everything here. Default: the user's stdout lines go to `sys.stdout`, all else to
            `sys.stderr`, as they are at that moment.
    """

    def __init__(self, level: int, run_path: str, *, file: TextIO | None = None) -> None:
        self._level = level
        self._run_path = run_path
        self._status = _Status()
        self._lock = threading.RLock()
        streams = _Streams(file)
        self._plain = _PlainView(streams, self._status)
        self._view: _View = self._plain
        if level <= logging.INFO:
            self._view = _live_view(streams, self._status, file) or self._plain

    @_watches
    def state(self, name: str, detail: str = "") -> None:
        """Show what the run is doing: "starting", "running", "restarting", "finished" ..."""
        with self._lock:
            first = not self._status.state
            self._status.state, self._status.detail = name, detail
            if first and self._run_path and self._level <= logging.INFO:
                self._view.line(f"run directory {self._run_path}")
            self._show_state()

    @_watches
    def workers(self, count: int) -> None:
        """Show how many workers the run has."""
        with self._lock:
            self._status.workers = count
            if self._status.state == "running":
                self._show_state()

    def _show_state(self) -> None:
        if self._level <= logging.INFO:
            self._view.state_changed()

    @_watches
    def report(self, rank: int, index: int, metrics: Mapping[str, Any]) -> None:
        """Take note of a report. Called for every one of them; only rank 0's are shown, and few."""
        if rank == 0 and self._level <= logging.INFO:
            self._status.report = (index, metrics)
            self._view.reported()

    @_watches
    def checkpoint(self, path: str, nbytes: int, seconds: float) -> None:
        """Show that a checkpoint is committed: where, how large, and how long it took."""
        if self._level <= logging.INFO:
            with self._lock:
                name = os.path.relpath(path, self._run_path) if self._run_path else path
                name = path if name.startswith("..") else name
                self._status.checkpoint = f"{name} ({_size(nbytes)} in {seconds:.1f} s)"
                self._view.committed()

    @_watches
    def printed(self, rank: int, line: Printed) -> None:
        """Show a line that the training function printed, as it is; `[rank 3]` before it if not 0."""
        if rank == 0 and self._level > logging.WARNING:
            return
        text = line.text if rank == 0 else f"[rank {rank}] {line.text}"
        with self._lock:
            if line.transient:
                self._view.redrawn(text, line.stream)
            else:
                self._view.user_line(text, line.stream)

    @_watches
    def notice(self, text: str) -> None:
        """Show what the user should know or do."""
        if self._level <= logging.WARNING:
            with self._lock:
                self._view.line(text)

    @_watches
    def failure(self, failure: WorkerFailure) -> None:
        """Show a worker's failure in full."""
        with self._lock:
            self._view.line(failure.describe())

    @_watches
    def close(self) -> None:
        """Show what was held back, and end the live line. What comes later is shown as plain lines."""
        with self._lock:
            view, self._view = self._view, self._plain
            view.close()


class _Status:
    """What is known of the run; the views read it, from other threads too."""

    def __init__(self) -> None:
        self.state = ""
        self.detail = ""
        self.workers = 0
        self.report: tuple[int, Mapping[str, Any]] | None = None
        self.checkpoint = ""
        self.redrawn = ""
        self._began = time.monotonic()

    def elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"

    def activity(self) -> str:
        workers = f" on {self.workers} worker{'s' * (self.workers != 1)}"
        shown = self.state + (workers if self.state == "running" and self.workers else "")
        return f"{shown}: {self.detail}" if self.detail else shown

    def metrics(self) -> str:
        if self.report is None:
            return ""
        index, metrics = self.report
        shown = [f"{key} {short}" for key, value in metrics.items() if (short := _short(value))]
        return f"report {index}: " + ", ".join(shown[:_MAX_METRICS])

    def one_line(self) -> str:
        """Everything there is, the most telling first, since the end may not fit the screen."""
        parts = [self.activity(), self.metrics(), self.checkpoint, self.redrawn]
        return f"[drawbar {self.elapsed()}] " + " | ".join(part for part in parts if part)


def _short(value: object) -> str:
    if isinstance(value, bool | int | str):
        return str(value)[:24]
    try:
        return f"{float(value):.4g}"  # type: ignore[arg-type]  # numpy scalars, 0-d tensors
    except (TypeError, ValueError):
        return ""


def _size(nbytes: int) -> str:
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


class _Streams:
    """Where lines go. `sys.stdout` and `sys.stderr` are looked up each time: tests replace them."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def get(self, name: StreamName) -> TextIO:
        stream: TextIO = self._file or getattr(sys, name)
        return stream

    def write_line(self, name: StreamName, text: str) -> None:
        stream = self.get(name)
        stream.write(text + "\n")
        stream.flush()


class _View(Protocol):
    """How a run looks. The `_Status` it was made with has changed before a method tells it so."""

    def line(self, text: str) -> None:
        """Show a line of Drawbar's own, which stays."""

    def user_line(self, text: str, stream: StreamName) -> None:
        """Show a line of the user's, which stays, unchanged."""

    def redrawn(self, text: str, stream: StreamName) -> None:
        """Show a state of a line that will be redrawn."""

    def state_changed(self) -> None:
        """Show the new state or number of workers."""

    def reported(self) -> None:
        """Show the new metrics, perhaps: there may be thousands per second."""

    def committed(self) -> None:
        """Show the new checkpoint, perhaps."""

    def close(self) -> None:
        """Show what was held back."""


class _Sparse:
    """Lets one in `_PLAIN_PERIOD_S` seconds pass, and remembers whether the newest did not."""

    def __init__(self) -> None:
        self._next = 0.0
        self.held = False

    def passes(self) -> bool:
        now = time.monotonic()
        self.held = now < self._next
        if not self.held:
            self._next = now + _PLAIN_PERIOD_S
        return not self.held


class _PlainView:
    """Plain lines."""

    def __init__(self, streams: _Streams, status: _Status) -> None:
        self._streams = streams
        self._status = status
        self._shown_state = ""
        self._metrics = _Sparse()
        self._checkpoints = _Sparse()
        self._redraws = _Sparse()

    def line(self, text: str) -> None:
        self._streams.write_line("stderr", f"[drawbar {self._status.elapsed()}] {text}")

    def user_line(self, text: str, stream: StreamName) -> None:
        self._streams.write_line(stream, text)

    def redrawn(self, text: str, stream: StreamName) -> None:
        if self._redraws.passes():
            self._streams.write_line(stream, text)

    def state_changed(self) -> None:
        shown = self._status.activity()
        if shown != self._shown_state:
            if self._status.state in ("finished", "failed"):
                self.close()
            self._shown_state = shown
            self.line(shown)

    def reported(self) -> None:
        if self._metrics.passes():
            self.line(self._status.metrics())

    def committed(self) -> None:
        if self._checkpoints.passes():
            self._line_of_checkpoint()

    def _line_of_checkpoint(self) -> None:
        self.line(f"committed {self._status.checkpoint}")

    def close(self) -> None:
        if self._metrics.held:
            self._metrics.held = False
            self.line(self._status.metrics())
        if self._checkpoints.held:
            self._checkpoints.held = False
            self._line_of_checkpoint()


class _TerminalView:
    """One live line at the bottom of the terminal, redrawn by rich four times per second.

    A stream that does not lead to the terminal (`python train.py > out.txt`) is left alone.
    """

    def __init__(self, streams: _Streams, status: _Status, file: TextIO | None) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live
        from rich.text import Text

        def draw() -> Text:
            return Text(status.one_line(), no_wrap=True, overflow="ellipsis")

        self._streams = streams
        self._status = status
        self._live = Live(
            console=RichConsole(file=file, stderr=True),
            get_renderable=draw,
            transient=True,
            redirect_stdout=file is None and streams.get("stdout").isatty(),
            redirect_stderr=file is None,
        )
        self._live.start()

    def line(self, text: str) -> None:
        self._above(f"[drawbar {self._status.elapsed()}] {text}")

    def user_line(self, text: str, stream: StreamName) -> None:
        self._status.redrawn = ""
        if self._streams.get(stream).isatty():
            self._above(text)
        else:
            self._streams.write_line(stream, text)

    def _above(self, text: str) -> None:
        self._live.console.out(text, highlight=False)

    def redrawn(self, text: str, stream: StreamName) -> None:
        self._status.redrawn = text

    def state_changed(self) -> None:
        """Leave it to the next redraw."""

    reported = committed = state_changed

    def close(self) -> None:
        self._status.redrawn = ""
        self._live.stop()
        self._streams.write_line("stderr", self._status.one_line())


class _NotebookView:
    """One line in the cell's output that is updated in place; plain lines follow it.

    Made with IPython's display handle: rich would need ipywidgets, and turn each line into HTML.
    """

    def __init__(self, streams: _Streams, status: _Status) -> None:
        from IPython.display import display

        self._streams = streams
        self._status = status
        self._drawn_at = time.monotonic()
        self._handle = display(self._content(), raw=True, display_id=True)

    def _content(self) -> dict[str, str]:
        return {"text/plain": self._status.one_line()}

    def _draw(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._drawn_at >= _NOTEBOOK_PERIOD_S:
            self._drawn_at = now
            self._handle.update(self._content(), raw=True)

    def line(self, text: str) -> None:
        self._streams.write_line("stderr", f"[drawbar {self._status.elapsed()}] {text}")

    def user_line(self, text: str, stream: StreamName) -> None:
        self._status.redrawn = ""
        self._streams.write_line(stream, text)

    def redrawn(self, text: str, stream: StreamName) -> None:
        self._status.redrawn = text
        self._draw()

    def state_changed(self) -> None:
        self._draw(at_once=True)

    def reported(self) -> None:
        self._draw()

    committed = state_changed

    def close(self) -> None:
        self._status.redrawn = ""
        self._draw(at_once=True)


def _live_view(streams: _Streams, status: _Status, file: TextIO | None) -> _View | None:
    """Give the view with a live line, or None where nothing can be redrawn."""
    try:
        terminal = streams.get("stderr").isatty()
        if terminal and os.environ.get("TERM", "").lower() not in ("dumb", "unknown"):
            return _TerminalView(streams, status, file)
        if file is None and _in_notebook():
            return _NotebookView(streams, status)
    except Exception:
        logger.debug("no live line", exc_info=True)
    return None


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == "ZMQInteractiveShell"
