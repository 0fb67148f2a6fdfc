"""What a run shows in the driver. It only watches: no method waits, and none raises.

On a terminal and in a notebook the run is one live line, which the user's own lines pass above.
Elsewhere (a log file, CI) it is plain lines, few enough to read: metrics, checkpoints and redrawn
progress bars at most every 10 s. Both are a `View`; `Console` decides what is worth showing.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TextIO, TypeVar

from drawbar.train._console.views import (
    PlainView,
    Status,
    Streams,
    View,
    live_view,
    readable_size,
    shown_metrics,
)
from drawbar.train._errors import WorkerFailure
from drawbar.train._messages import Printed

_P = ParamSpec("_P")
_T = TypeVar("_T")

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
        file: Write everything here. Default: the user's stdout lines go to `sys.stdout`, all else
            to `sys.stderr`, as they are at that moment.
        live: Whether a terminal or notebook gets a live line. False where the function runs in this
            very process: a prompt of `pdb` or `input()` would be redrawn away.
    """

    def __init__(
        self, level: int, run_path: str, *, file: TextIO | None = None, live: bool = True
    ) -> None:
        self._level = level
        self._run_path = run_path
        self._status = Status()
        self._lock = threading.RLock()
        streams = Streams(file)
        self._plain = PlainView(streams, self._status)
        self._view: View = self._plain
        if live and level <= logging.INFO:
            self._view = live_view(streams, self._status, file) or self._plain

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
                name = path.removeprefix(f"{self._run_path.rstrip('/')}/")
                self._status.checkpoint = f"{name} ({readable_size(nbytes)} in {seconds:.1f} s)"
                self._view.committed()

    @_watches
    def validated(self, name: str, metrics: Mapping[str, Any], seconds: float) -> None:
        """Show what came of a checkpoint's validation."""
        if self._level <= logging.INFO:
            with self._lock:
                self._view.line(f"validated {name} in {seconds:.1f} s: {shown_metrics(metrics)}")

    @_watches
    def printed(self, rank: int, line: Printed) -> None:
        """Show a line of the training function as it is; those of rank 3 begin with `[rank 3]`."""
        if rank == 0 and line.record != (self._level > logging.WARNING):
            return  # of rank 0 either all that it prints is shown, or the errors that it logs
        text = line.text if rank == 0 else f"[rank {rank}] {line.text}"
        with self._lock:
            self._status.redrawn = text if line.transient else ""
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
    def failure(self, failure: WorkerFailure, is_raised: bool = False) -> None:
        """Show a worker's failure: in full, or without its traceback if an error will show that."""
        with self._lock:
            self._view.line(failure.summary() if is_raised else failure.describe())

    @_watches
    def close(self) -> None:
        """Show what was held back and end the live line. What comes later makes plain lines."""
        with self._lock:
            self._status.redrawn = ""
            view, self._view = self._view, self._plain
            view.close()
