"""A run that is over, seen from its directory."""

from __future__ import annotations

import contextlib

import cloudpickle

from drawbar.train._controller.run import ControllerOutcome, RunOutcome
from drawbar.train._history.journal import read_events
from drawbar.train._history.result import Result
from drawbar.train._history.timeline import FINAL_STATUSES, RunState
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.run_files import OUTCOME_FILE


class EndedRun:
    """What `RunHandle` asks of a run, answered by the run's directory."""

    detached = False

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._events = read_events(directory)
        self._snapshot = RunState.from_events(self._events)

    @classmethod
    def find(cls, directory: RunDirectory) -> EndedRun | None:
        """Give the run of a directory; None if there is none, or it has not ended."""
        try:
            run = cls(directory)
        except FileNotFoundError:
            return None
        return run if run.snapshot().status in FINAL_STATUSES else None

    @property
    def is_complete(self) -> bool:
        """Whether the directory has all there is: a detached run's host tells its ending last."""
        return (
            not self._snapshot.is_detached
            or self._directory.run_files.read(OUTCOME_FILE) is not None
        )

    @property
    def silence(self) -> str:
        """Nobody needs to answer."""
        return ""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._directory.name

    @property
    def path(self) -> str:
        """Where the run lies."""
        return self._directory.uri

    def join(self, timeout: float | None = None) -> bool:
        """It is over."""
        return True

    def stop(self, *, save: bool) -> None:
        """It is over."""

    def kill(self) -> None:
        """It is over."""

    def diagnose(self) -> str:
        """Nobody stands anywhere."""
        return ""

    def snapshot(self) -> RunState:
        """Say how the run stood at its end."""
        return self._snapshot

    def read_log(self, rank: int) -> str:
        """Give what a rank has written."""
        return (self._directory.run_files.read(f"logs/rank_{rank}.log") or b"").decode(
            errors="replace"
        )

    def ending(self) -> RunOutcome:
        """Give how the run ended: with return values if it was detached.

        Of any other run nothing is unpickled, whatever lies in its directory.
        """
        packed = (
            self._directory.run_files.read(OUTCOME_FILE) if self._snapshot.is_detached else None
        )
        if packed is not None:
            with contextlib.suppress(Exception):  # it needs classes that are not here
                ending: RunOutcome = cloudpickle.loads(packed)
                if ending.snapshot.timeline == self._snapshot.timeline:  # of the last start
                    return ending
        result = Result.from_run_directory(self._directory, self._events)
        return RunOutcome(ControllerOutcome(error=result.error), self._snapshot, result)
