"""`RunView`: one view of a run, in this process, in another one, or ended.

Its implementations:

- `ControllerThread`: the controller runs in this process.
- `SameHostRun`: it runs in another process of this user on this host.
- `HostActorRun`: it runs in an actor (detached runs, Ray Client).
- `TorchrunRun`: it runs in the process of rank 0.
- `EndedRun`: the run has ended.

`LiveGoodput` reads the goodput of a run in progress.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
import weakref
from dataclasses import replace
from typing import Protocol

import cloudpickle

from drawbar._modes import control_socket
from drawbar._observe.goodput import Goodput
from drawbar._observe.goodput_meter import GoodputMeter
from drawbar._process.errors import ControllerError
from drawbar._records.journal import decode_readable_events
from drawbar._records.result import Result
from drawbar._records.run_history import RunHistory
from drawbar._records.stored_reports import StoredReports
from drawbar._records.timeline import FINAL_STATUSES, RunState
from drawbar._storage.journal_file import is_locked, strip_torn_line
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.run_files import OUTCOME_FILE
from drawbar._storage.storage_path import read_file_or_none
from drawbar.train._controller.run import ControllerOutcome, RunOutcome
from drawbar.train._driver.controller_thread import DIAGNOSIS_TIMEOUT_S

REPLY_TIMEOUT_S = 10.0
"""Time after which a process that has not replied counts as unresponsive."""


class RunView(control_socket.ControllableRun, Protocol):
    """View of a run: its state, logs, and outcome, and the way to control it.

    By default, the view reads state, logs, and outcome from the run directory.
    """

    directory: RunDirectory
    """Run directory."""
    is_detached: bool = False
    """True if the run continues when this process stops waiting for it."""

    @property
    def unresponsive_reason(self) -> str:
        """Reason why the process that controls the run counts as unresponsive, or ""."""
        return ""

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended and return whether it has."""
        ...

    def get_state(self) -> RunState:
        """Return the current or final state of the run."""
        return RunHistory.read(self.directory).make_state()

    def read_log(self, rank: int) -> bytes | None:
        """Return the output that a rank has written so far, or None if there is none."""
        return self.directory.run_files.read(f"logs/rank_{rank}.log")

    def get_outcome(self) -> RunOutcome:
        """Return the outcome of the run, after its end."""
        return read_outcome(self.directory)


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


class SameHostRun(RunView):
    """View of a run that another process of this user on this host controls.

    That process accepts requests through a socket. Create instances with `find`.
    """

    is_detached = True  # the run continues when its clients stop waiting

    def __init__(self, directory: RunDirectory, connection: socket.socket) -> None:
        self.directory = directory
        self._connection = connection
        # Close the connection with the handle, so that the run does not keep a dead client.
        weakref.finalize(self, connection.close)

    @classmethod
    def find(cls, directory: RunDirectory) -> SameHostRun | None:
        """Return the run in a directory, or None if no process of this user here runs it."""
        connection = control_socket.connect(directory.local_path, control_socket.WAIT_FOR_END)
        return None if connection is None else cls(directory, connection)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended and return whether it has."""
        ended, _, _ = select.select([self._connection], [], [], timeout)
        return bool(ended)

    def stop(self, *, save: bool | None) -> None:
        """Stop the run. See `Controller.stop`."""
        self._request({True: "stop", False: "stop now", None: "stop if unused"}[save])

    def kill(self) -> None:
        """Kill every process of the run immediately."""
        self._request("kill")

    def diagnose(self) -> str:
        """Return a description of what each rank is blocked in, or "" if the run has ended."""
        return self._request("diagnose", extra_seconds=DIAGNOSIS_TIMEOUT_S)

    def _request(self, request: str, *, extra_seconds: float = 0.0) -> str:
        timeout = REPLY_TIMEOUT_S + extra_seconds
        reply = control_socket.send_request(self.directory.local_path, request, timeout)
        if reply is not None and reply.error:
            name, uri = self.directory.name, self.directory.uri
            raise RuntimeError(f"run {name!r} in {uri}: {reply.error}")
        return "" if reply is None else reply.text

    def get_state(self) -> RunState:
        """Return the current or final state of the run."""
        # After its end, another process may have resumed it.
        is_in_progress = not self.join(0) or is_locked(self.directory.journal_path)
        return super().get_state() if is_in_progress else _read_final_state(self.directory)

    def read_log(self, rank: int) -> bytes | None:
        """Return the output that a rank has written so far, or None if there is none."""
        return self.directory.read_log(rank)


def _read_final_state(directory: RunDirectory) -> RunState:
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
    return RunOutcome(ControllerOutcome(error=error), _read_final_state(directory))


class LiveGoodput:
    """Goodput of one run. Each call of `read` reads only new events.

    Args:
        directory: Run directory.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._meter = GoodputMeter(StoredReports(directory.run_files).get_last_time)
        self._offset = 0

    def read(self, *, is_active: bool) -> Goodput:
        """Return the goodput until the end of the run, or until now if a process hosts it."""
        journal = self._directory.journal_path
        data = read_file_or_none(journal.parent, journal.name, self._offset)
        if data is None:  # the run is on another node, or has ended and is in remote storage
            return RunHistory.read(self._directory).compute_goodput(is_active=is_active)
        lines = strip_torn_line(data)
        self._offset += len(lines)
        for event in decode_readable_events(lines)[0]:
            self._meter.apply(event)
        return self._meter.compute(now=time.time() if is_active else None)
