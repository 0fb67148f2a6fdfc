"""`RunMode` starts a run, and `RunView` shows it: in this process, in another one, or ended.

Each mode has a subclass of `RunView`, such as `InProcessRun`. `EndedRun` shows a run that has
ended.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Protocol

import cloudpickle

from drawbar._handle.result import Result
from drawbar._handle.run_outcome import RunOutcome
from drawbar._history.run_history import RunHistory
from drawbar._process.errors import ControllerError
from drawbar._records.timeline import FINAL_STATUSES, RunState
from drawbar._storage.journal_file import is_locked
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.run_files import OUTCOME_FILE
from drawbar.train._controller.run import ControllerOutcome, RunSpec
from drawbar.train._worker.train_loop import TrainLoop


class RunView(ABC):
    """View of a run: its state, logs, and outcome, and the way to control it.

    A `RunMode` returns a view of the run that it has started, and `RunHandle` shows it to the user.
    By default, a view reads state, logs, and outcome from the run directory.

    Attributes:
        directory: Run directory. Set it in the constructor.
        is_detached: Whether the run continues when this process stops waiting for it.
        unresponsive_reason: Why the process that controls the run counts as unresponsive, or "".

    Example:
        ```python
        class ProcessRun(RunView):
            def __init__(self, process, directory):
                self.process = process
                self.directory = directory

            def join(self, timeout=None):
                self.process.join(timeout)
                return not self.process.is_alive()
        ```
    """

    directory: RunDirectory
    is_detached: bool = False

    @property
    def unresponsive_reason(self) -> str:
        """Why the process that controls the run counts as unresponsive, or ""."""
        return ""

    @abstractmethod
    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended and return whether it has.

        Args:
            timeout: Maximum number of seconds to wait. None waits without limit.
        """

    @abstractmethod
    def stop(self, *, save: bool | None) -> None:
        """Request the run to stop. Do not wait for its end.

        Args:
            save: Stop after the next commit, instead of immediately. None, after Ctrl-C or SIGTERM,
                stops after the next commit if the functions call `should_checkpoint()`.
        """

    @abstractmethod
    def kill(self) -> None:
        """Kill every process of the run immediately.

        The journal then has no end, and `drawbar show` reports the run as interrupted.
        """

    @abstractmethod
    def diagnose(self) -> str:
        """Return a description of what each rank is blocked in."""

    def get_state(self) -> RunState:
        """Return the current or final state of the run. It has failed if its process was killed."""
        # After its end, another process may have resumed it.
        if self.join(0) and not is_locked(self.directory.journal_path):
            return read_final_state(self.directory)
        return self._read_state()

    def _read_state(self) -> RunState:
        return RunHistory.read(self.directory).make_state()

    def read_log(self, rank: int) -> bytes | None:
        """Return the output that a rank has written so far, or None if there is none.

        Args:
            rank: World rank.
        """
        return self.directory.run_files.read(f"logs/rank_{rank}.log")

    def get_outcome(self) -> RunOutcome:
        """Return the outcome of the run, after its end.

        The run directory does not contain the return values of the functions. To have them, send
        `run.get_outcome()` from the process that hosts the run, and return it here.
        """
        return read_outcome(self.directory)


class RunMode(Protocol):
    """Way to start a run: it decides in which processes the controller and the workers run.

    `DataParallelTrainer.get_run_mode` returns the mode of a trainer.

    Example:
        ```python
        class LoggedMode:
            def __init__(self, mode):
                self.mode = mode

            def start(self, spec, train_loop):
                run = self.mode.start(spec, train_loop)
                print("started", run.directory.uri)
                return run
        ```
    """

    def start(self, spec: RunSpec, train_loop: TrainLoop) -> RunView:
        """Start a run and return at once.

        Args:
            spec: Settings of the run, and the serialized training function. It can be pickled.
            train_loop: The training function with its config, as an object of this process. Runs
                on Ray use the serialized function in `spec` instead.

        Returns:
            View of the run.

        Raises:
            Exception: The run cannot start. `fit()` and `start()` raise this exception.
        """
        ...


class EndedRun(RunView):
    """View of a run that has ended, from its directory."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._history = RunHistory.read(directory)
        self._state = self._history.make_state()

    @classmethod
    def find(cls, directory: RunDirectory) -> EndedRun | None:
        """Return the run in a directory, or None if there is none or it has not ended."""
        try:
            run = cls(directory)
        except FileNotFoundError:
            return None
        return run if run.get_state().status in FINAL_STATUSES else None

    @property
    def is_complete(self) -> bool:
        """True if all files of the run are written.

        The host actor of a detached run writes the outcome last. Other runs store no outcome.
        """
        return not self._state.is_detached or self._read_outcome_file() is not None

    def join(self, timeout: float | None = None) -> bool:
        """Return True."""
        return True

    def stop(self, *, save: bool | None) -> None:
        """Do nothing."""

    def kill(self) -> None:
        """Do nothing."""

    def diagnose(self) -> str:
        """Return an empty string: there are no workers."""
        return ""

    def get_state(self) -> RunState:
        """Return the state after the last event in the journal."""
        return self._state

    def get_outcome(self) -> RunOutcome:
        """Return the outcome of the run, with return values if it was detached.

        Other runs store no outcome. A file with its name in their directory is not trusted, and is
        therefore not unpickled.
        """
        serialized = self._read_outcome_file() if self._state.is_detached else None
        if serialized is not None:
            with contextlib.suppress(Exception):  # its classes may not be importable here
                outcome: RunOutcome = cloudpickle.loads(serialized)
                # An earlier start of the run may have stored it.
                if outcome.snapshot.timeline == self._state.timeline:
                    return outcome
        result = Result.from_run_directory(self.directory, self._history)
        return RunOutcome(ControllerOutcome(error=result.error), self._state, result)

    def _read_outcome_file(self) -> bytes | None:
        return self.directory.run_files.read(OUTCOME_FILE)


def read_final_state(directory: RunDirectory) -> RunState:
    """Return the state of a run whose controller has ended or died. If it died, the run failed."""
    state = RunState()
    with contextlib.suppress(FileNotFoundError):  # the directory is on another machine, or deleted
        state = RunHistory.read(directory).make_state()
    return state if state.status in FINAL_STATUSES else replace(state, status="failed")


def read_outcome(directory: RunDirectory, error: ControllerError | None = None) -> RunOutcome:
    """Return the outcome of a run whose controller has ended or died, from the run directory.

    Args:
        directory: Run directory.
        error: Outcome of a run that did not end according to its journal.

    Returns:
        The outcome. If the controller died, the run has failed with a `ControllerError`.
    """
    ended = EndedRun.find(directory)
    if ended is not None:
        return ended.get_outcome()
    if error is None:
        error = ControllerError(
            "the process that hosted the run died, and its journal contains no end\n\nrun "
            f'directory: {directory.uri}\nTo resume from the latest checkpoint, set resume="auto".',
            path=directory.uri,
        )
    return RunOutcome(ControllerOutcome(error=error), read_final_state(directory))
