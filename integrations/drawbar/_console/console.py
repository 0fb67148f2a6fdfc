"""`Console`: watcher that selects the events of a run to show.

A terminal has one live line below the lines that the user prints. A notebook has a card above them.
Elsewhere (a log file, CI) the console prints plain lines: every restart, up to
`displays.MAX_COMMIT_LINES` commits in 10 s, and metrics and redrawn progress bars at most every
10 s. Each of these forms is a `Display`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TextIO

from drawbar._base.wording import format_size
from drawbar._console.displays import (
    Display,
    DisplayStatus,
    OutputStreams,
    PlainDisplay,
    format_metrics,
)
from drawbar._console.live_displays import NotebookDisplay, TerminalDisplay
from drawbar._console.slow_phases import START_PHASES, run_if_slow
from drawbar._process.output_lines import OutputLine
from drawbar._process.worker_failure import WorkerFailure
from drawbar._records import events, live_events
from drawbar._records.live_events import Event
from drawbar._storage.manifest import ReportedCheckpointStatus

logger = logging.getLogger("drawbar.train")


class Console:
    """Console of one run. Thread-safe. Its methods neither block nor raise.

    Args:
        level: A `logging` level. INFO shows everything; WARNING shows the output of rank 0, errors
            of the other ranks, notices, and failures; ERROR shows only failures and errors.
        run_path: Run directory.
        file: Receives all output. Default: the user's stdout lines are written to `sys.stdout`, and
            everything else to `sys.stderr`.
        is_live: Whether a terminal or notebook gets a live display. Use False if the training
            function runs in this process: the live line would overwrite the prompts of `pdb` and
            `input()`.
    """

    def __init__(
        self, level: int, run_path: str, *, file: TextIO | None = None, is_live: bool = True
    ) -> None:
        self._level = level
        self._budget = ""  # remaining failure budget
        self._line_status = DisplayStatus(run_path)
        self._has_shown_path = False
        self._num_imported = 0  # ranks of the attempt that have imported the function
        self._num_running = 0  # ranks of the attempt whose function runs
        self._slow_phase = threading.Timer(0, lambda: None)  # not started
        self._lock = threading.RLock()
        self._outputs = OutputStreams(file)
        self._plain_display = PlainDisplay(self._outputs, self._line_status)
        self._display: Display = self._plain_display
        if is_live and level <= logging.INFO:
            self._display = self._make_live_display(file) or self._plain_display

    def _make_live_display(self, file: TextIO | None) -> Display | None:
        """Return a display that is redrawn; None if the output supports none."""
        try:
            terminal = self._outputs.get_stream("stderr").isatty()
            if terminal and os.environ.get("TERM", "").lower() not in ("dumb", "unknown"):
                return TerminalDisplay(self._outputs, self._line_status, file)
            if file is None and _is_in_notebook():
                return NotebookDisplay(self._outputs, self._line_status)
        except Exception:
            logger.debug("live display failed to start", exc_info=True)
        return None

    def on_event(self, event: Event) -> None:
        """Show an event if the level and the kind of output require it."""
        try:
            self._show(event)
        except Exception:  # a closed stdout must not end the run
            logger.debug("%s could not be shown", type(event).__name__, exc_info=True)

    def _show(self, event: Event) -> None:
        # Without the lock: there may be thousands of reports per second, of which few are shown.
        if isinstance(event, live_events.ReportsReceived):
            if event.rank == 0 and self._level <= logging.INFO:
                self._line_status.report_rate.add(event.times[-1], event.indices[-1] + 1)
                self._line_status.last_report = (event.indices[-1], event.metrics[-1])
                self._display.on_report()
            return
        with self._lock:
            self._line_status.state.apply(event)
            match event:
                case live_events.ProgressReceived() if self._level <= logging.INFO:
                    self._display.on_report()
                case live_events.LinePrinted():
                    self._show_line(event.rank, event.line)
                case live_events.BytesWritten() if self._level <= logging.WARNING:
                    self._display.write_user_bytes(event.data, event.stream)
                case live_events.Notice():
                    self._print(logging.WARNING, event.text)
                case live_events.WorkersFailed():
                    self._budget = event.budget
                    if event.failures and not event.is_final:  # fit() raises the last one
                        self._show_failure(event.failures[0])
                    if event.verdict is not None and event.verdict.excluded_node:
                        self._print(logging.WARNING, event.verdict.describe())
                case events.PreemptionAnnounced():
                    ranks = ", ".join(map(str, event.info.preempted_ranks))
                    text = f"The nodes of ranks {ranks} are about to be removed."
                    self._print(logging.WARNING, text)
                case events.RanksRecovered() | events.HealthDecided():
                    self._print(logging.WARNING, event.describe())
                case events.AttemptEnded() if event.cause == "resize":
                    text = "Resources for more workers are available. Restarting with more workers."
                    self._print(logging.WARNING, text)
                case events.AttemptEnded() if event.rollback is not None:
                    self._print(logging.WARNING, event.rollback.describe())
                case events.CheckpointCommitted():
                    size = format_size(event.nbytes)
                    self._line_status.last_checkpoint = (
                        f"{event.name} ({size} in {event.seconds:.1f} s)"
                    )
                    self._line_status.checkpoints[event.name] = event.metrics
                    if self._level <= logging.INFO:
                        self._display.on_commit()
                case events.CheckpointRead(source="memory"):
                    self._print(logging.INFO, f"Rank {event.rank} reads {event.name} from memory.")
                case events.CheckpointRead(source="peer"):
                    text = f"Rank {event.rank} reads {event.name} from the memory of a peer node."
                    self._print(logging.INFO, text)
                case events.CheckpointDeleted():
                    self._line_status.checkpoints.pop(event.name, None)
                case events.CheckpointValidated():
                    self._show_validation(event)
                case _:
                    self._show_state(event)

    def _show_state(self, event: Event) -> None:
        """Show the state of the run if the event changes it."""
        status = self._line_status
        is_first = not status.phase
        match event:
            case events.AttemptStarted():
                # Attempts before the first one that is shown were started by an earlier driver.
                phase = ("resuming" if is_first else "restarting") if event.attempt else "starting"
                detail = self._describe_start(event)
            case live_events.ValidationsPending():
                phase, detail = "waiting for validations", event.description
            case events.WorkersStarted():
                self._num_imported = self._num_running = 0
                phase, detail = "importing", ""
            case live_events.RankImported():
                self._num_imported += 1
                if self._num_imported != status.state.num_workers:
                    return
                phase, detail = "joining the process group", ""
            case events.UserFunctionStarted():
                self._num_running += 1
                if self._num_running != status.state.num_workers:
                    return
                phase, detail = "running", ""
            case events.RunEnded() | live_events.ControllerFailed():
                phase, detail = status.state.status, ""
            case _:
                return
        status.phase, status.detail = phase, detail
        self._slow_phase.cancel()
        if phase in START_PHASES:
            self._slow_phase = run_if_slow(lambda: self._show_slow_phase(phase))
            return
        if self._level <= logging.INFO:
            if status.path and not self._has_shown_path:
                self._has_shown_path = True
                self._display.print_line(f"run directory {status.path}")
            self._display.on_state_change()

    def _show_slow_phase(self, phase: str) -> None:
        """Show a phase of the start that has lasted for a while."""
        with self._lock:
            if self._line_status.phase == phase and self._level <= logging.INFO:
                self._display.on_state_change()

    def _show_failure(self, failure: WorkerFailure) -> None:
        # If a program has exited, its output already shows the reason.
        text = failure.headline() if failure.kind == "exit" else failure.describe()
        self._print(logging.CRITICAL, text)

    def _describe_start(self, event: events.AttemptStarted) -> str:
        number = f"attempt {event.attempt}" if event.attempt else ""
        start = f"from {event.resume_checkpoint}" if event.resume_checkpoint else ""
        budget, self._budget = self._budget, ""
        detail = " ".join(part for part in (number, start) if part)
        return f"{detail} ({budget})" if budget else detail

    def _show_validation(self, event: events.CheckpointValidated) -> None:
        if event.status is ReportedCheckpointStatus.VALIDATED:
            metrics = format_metrics(event.metrics)
            self._print(logging.INFO, f"validated {event.name} in {event.seconds:.1f} s: {metrics}")
        else:
            self._print(
                logging.WARNING,
                f"The validation of {event.name} failed, training continues: {event.error}",
            )

    def _show_line(self, rank: int, line: OutputLine) -> None:
        """Show a line of the training function, with a prefix such as `[rank 3]` unless rank 0."""
        # Up to level WARNING, show all lines of rank 0. Above it, show only errors that it logs.
        if rank == 0 and line.is_log_record != (self._level > logging.WARNING):
            return
        text = line.text if rank == 0 else f"[rank {rank}] {line.text}"
        self._line_status.redrawn_line = text if line.is_redraw else ""
        if line.is_redraw:
            self._display.on_redraw(text, line.stream)
        else:
            self._display.print_user_line(text, line.stream)

    def _print(self, level: int, text: str) -> None:
        if self._level <= level:
            self._display.print_line(text)

    def close(self) -> None:
        """Print suppressed lines and end the live line. Later events are printed as plain lines."""
        try:
            with self._lock:
                self._slow_phase.cancel()
                self._line_status.redrawn_line = ""
                display, self._display = self._display, self._plain_display
                display.close()
                self._outputs.close()
        except Exception:
            logger.debug("the console failed to close", exc_info=True)


def _is_in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == "ZMQInteractiveShell"
