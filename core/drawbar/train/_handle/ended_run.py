"""View of a run that has ended, from its run directory."""

from __future__ import annotations

import contextlib

import cloudpickle

from drawbar.train._controller.run import ControllerOutcome, RunOutcome
from drawbar.train._history.result import Result
from drawbar.train._history.run_history import RunHistory
from drawbar.train._history.timeline import FINAL_STATUSES, RunState
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.run_files import OUTCOME_FILE


class EndedRun:
    """A run that has ended, read from its directory."""

    is_detached = False

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
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
        return (
            not self._state.is_detached or self._directory.run_files.read(OUTCOME_FILE) is not None
        )

    @property
    def unresponsive_reason(self) -> str:
        """Always empty: no process needs to reply."""
        return ""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._directory.name

    @property
    def path(self) -> str:
        """Run directory, as a path or URI."""
        return self._directory.uri

    def join(self, timeout: float | None = None) -> bool:
        """Return True."""
        return True

    def stop(self, *, save: bool) -> None:
        """Do nothing."""

    def kill(self) -> None:
        """Do nothing."""

    def diagnose(self) -> str:
        """Return an empty string: there are no workers."""
        return ""

    def get_state(self) -> RunState:
        """Return the final state of the run."""
        return self._state

    def read_log(self, rank: int) -> str:
        """Return the output that a rank has written."""
        return (self._directory.run_files.read(f"logs/rank_{rank}.log") or b"").decode(
            errors="replace"
        )

    def get_outcome(self) -> RunOutcome:
        """Return the outcome of the run, with return values if it was detached.

        Other runs store no outcome. A file with its name in their directory is not trusted, and is
        therefore not unpickled.
        """
        serialized = (
            self._directory.run_files.read(OUTCOME_FILE) if self._state.is_detached else None
        )
        if serialized is not None:
            with contextlib.suppress(Exception):  # its classes may not be importable here
                outcome: RunOutcome = cloudpickle.loads(serialized)
                # An earlier start of the run may have stored it.
                if outcome.snapshot.timeline == self._state.timeline:
                    return outcome
        result = Result.from_run_directory(self._directory, self._history)
        return RunOutcome(ControllerOutcome(error=result.error), self._state, result)
