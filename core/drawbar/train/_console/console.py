"""What a run shows in the driver. It only watches: it neither waits nor raises.

On a terminal the run is one live line, which the user's own lines pass above; in a notebook it is a
card, which they follow. Elsewhere (a log file, CI) it prints plain lines: every restart, commits up
to `views.MAX_COMMIT_LINES` in 10 s, metrics and redrawn progress bars at most every 10 s. Each form
is a `View`; `Console` decides which events it shows.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TextIO

from drawbar.train._console.displays import (
    Display,
    DisplayStatus,
    OutputStreams,
    PlainDisplay,
    TerminalDisplay,
    format_metrics,
)
from drawbar.train._console.notebook import NotebookDisplay
from drawbar.train._errors import WorkerFailure
from drawbar.train._history.events import (
    AttemptEnded,
    AttemptStarted,
    BytesWritten,
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointValidated,
    ControllerFailed,
    Event,
    LinePrinted,
    Notice,
    PreemptionAnnounced,
    ReportReceived,
    RunEnded,
    ValidationsPending,
    WorkersFailed,
    WorkersStarted,
)
from drawbar.train._messages import Printed
from drawbar.train._storage.manifest import ReportedCheckpointStatus
from drawbar.train._storage.sizes import format_size

logger = logging.getLogger(__name__)


class Console:
    """Shows one run. Thread safe; cheap, and none of its methods raises.

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
        self, level: int, run_path: str, *, file: TextIO | None = None, is_live: bool = True
    ) -> None:
        self._level = level
        self._budget = ""  # that is left for failures
        self._line_status = DisplayStatus(run_path)
        self._lock = threading.RLock()
        self._outputs = OutputStreams(file)
        self._plain_display = PlainDisplay(self._outputs, self._line_status)
        self._display: Display = self._plain_display
        if is_live and level <= logging.INFO:
            self._display = self._make_live_display(file) or self._plain_display

    def _make_live_display(self, file: TextIO | None) -> Display | None:
        """Give the view that is redrawn, or None where nothing can be."""
        try:
            terminal = self._outputs.get_stream("stderr").isatty()
            if terminal and os.environ.get("TERM", "").lower() not in ("dumb", "unknown"):
                return TerminalDisplay(self._outputs, self._line_status, file)
            if file is None and _is_in_notebook():
                return NotebookDisplay(self._outputs, self._line_status)
        except Exception:
            logger.debug("no live view", exc_info=True)
        return None

    def on_event(self, event: Event) -> None:
        """Show an event, if it is worth it."""
        try:
            self._show(event)
        except Exception:  # a closed stdout does not end the run
            logger.debug("%s could not be shown", type(event).__name__, exc_info=True)

    def _show(self, event: Event) -> None:
        if isinstance(event, ReportReceived):  # thousands per second, of which few are shown
            if event.rank == 0 and self._level <= logging.INFO:
                self._line_status.last_report = (event.index, event.metrics)
                self._display.on_report()
            return
        with self._lock:
            match event:
                case LinePrinted():
                    self._show_line(event.rank, event.line)
                case BytesWritten() if self._level <= logging.WARNING:
                    self._display.write_user_bytes(event.data, event.stream)
                case Notice():
                    self._print(logging.WARNING, event.text)
                case WorkersFailed():
                    self._budget = event.budget
                    if event.failures and not event.is_final:  # fit() raises the last one
                        self._show_failure(event.failures[0])
                case PreemptionAnnounced():
                    ranks = ", ".join(map(str, event.info.preempted_ranks))
                    self._print(logging.WARNING, f"the nodes of ranks {ranks} are to be taken away")
                case AttemptEnded() if event.cause == "resize":
                    text = "there is room for more workers: the group grows"
                    self._print(logging.WARNING, text)
                case CheckpointCommitted():
                    size = format_size(event.nbytes)
                    self._line_status.last_checkpoint = (
                        f"{event.name} ({size} in {event.seconds:.1f} s)"
                    )
                    self._line_status.checkpoints[event.name] = event.metrics
                    if self._level <= logging.INFO:
                        self._display.on_commit()
                case CheckpointDeleted():
                    self._line_status.checkpoints.pop(event.name, None)
                case CheckpointValidated():
                    self._show_validation(event)
                case _:
                    self._show_state(event)

    def _show_state(self, event: Event) -> None:
        """Show the state of the run if the event changes it."""
        first = not self._line_status.phase
        match event:
            case AttemptStarted():
                # Attempts before the first one that is shown were started by an earlier driver.
                name = ("resuming" if first else "restarting") if event.attempt else "starting"
                detail = self._describe_start(event)
            case WorkersStarted():
                name, detail = "running", ""
                self._line_status.num_workers = len(event.workers)
            case ValidationsPending():
                name, detail = "waiting for validations", event.description
            case RunEnded():
                name, detail = event.outcome, ""
            case ControllerFailed():
                name, detail = "failed", ""
            case _:
                return
        self._line_status.phase, self._line_status.detail = name, detail
        if self._level <= logging.INFO:
            if first and self._line_status.path:
                self._display.print_line(f"run directory {self._line_status.path}")
            self._display.on_state_change()

    def _show_failure(self, cause: WorkerFailure) -> None:
        # The script's own output shows why it exited.
        text = cause.headline() if cause.kind == "exit" else cause.describe()
        self._print(logging.CRITICAL, text)

    def _describe_start(self, event: AttemptStarted) -> str:
        number = f"attempt {event.attempt}" if event.attempt else ""
        start = f"from {event.resume_checkpoint}" if event.resume_checkpoint else ""
        budget, self._budget = self._budget, ""
        detail = " ".join(part for part in (number, start) if part)
        return f"{detail} ({budget})" if budget else detail

    def _show_validation(self, event: CheckpointValidated) -> None:
        if event.status is ReportedCheckpointStatus.VALIDATED:
            shown = format_metrics(event.metrics)
            self._print(logging.INFO, f"validated {event.name} in {event.seconds:.1f} s: {shown}")
        else:
            self._print(
                logging.WARNING,
                f"the validation of {event.name} failed, the training goes on: {event.error}",
            )

    def _show_line(self, rank: int, line: Printed) -> None:
        """Show a line of the training function as it is; those of rank 3 begin with `[rank 3]`."""
        if rank == 0 and line.record != (self._level > logging.WARNING):
            return  # of rank 0 either all that it prints is shown, or the errors that it logs
        text = line.text if rank == 0 else f"[rank {rank}] {line.text}"
        self._line_status.redrawn_line = text if line.transient else ""
        if line.transient:
            self._display.on_redraw(text, line.stream)
        else:
            self._display.print_user_line(text, line.stream)

    def _print(self, level: int, text: str) -> None:
        if self._level <= level:
            self._display.print_line(text)

    def close(self) -> None:
        """Show what was held back and end the live line. What comes later makes plain lines."""
        try:
            with self._lock:
                self._line_status.redrawn_line = ""
                view, self._display = self._display, self._plain_display
                view.close()
                self._outputs.close()
        except Exception:
            logger.debug("what was held back could not be shown", exc_info=True)


def _is_in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == "ZMQInteractiveShell"
