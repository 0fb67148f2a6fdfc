"""View of a run in another process of this user on this host."""

from __future__ import annotations

import select
import socket
import weakref

from drawbar.train._controller.run import ControllerOutcome, RunOutcome
from drawbar.train._driver.control_socket import WAIT_FOR_END, connect, send_request
from drawbar.train._driver.controller_thread import DIAGNOSIS_TIMEOUT_S
from drawbar.train._errors import ControllerError
from drawbar.train._handle.ended_run import EndedRun
from drawbar.train._history.run_history import RunHistory
from drawbar.train._history.timeline import RunState
from drawbar.train._storage.run_directory import RunDirectory

_REPLY_TIMEOUT_S = 10.0


class SameHostRun:
    """A run that its process controls through a socket, and whose directory is readable.

    Create instances with `find`.
    """

    is_detached = True  # the run continues when its clients stop waiting

    def __init__(self, directory: RunDirectory, connection: socket.socket) -> None:
        self._directory = directory
        self._connection = connection
        # Close the connection with the handle, so that the run does not keep a dead client.
        weakref.finalize(self, connection.close)

    @classmethod
    def find(cls, directory: RunDirectory) -> SameHostRun | None:
        """Return the run in a directory, or None if no process of this user here runs it."""
        connection = connect(directory.local_path, WAIT_FOR_END)
        return None if connection is None else cls(directory, connection)

    @property
    def unresponsive_reason(self) -> str:
        """Always empty: requests raise `TimeoutError` if the process does not reply."""
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
        """Wait until the run has ended and return whether it has."""
        ended, _, _ = select.select([self._connection], [], [], timeout)
        return bool(ended)

    def stop(self, *, save: bool) -> None:
        """Stop the run: gracefully after its next commit, or immediately."""
        self._request("stop" if save else "stop now")

    def kill(self) -> None:
        """Kill every process of the run immediately."""
        self._request("kill")

    def diagnose(self) -> str:
        """Return a description of what each rank is blocked in, or "" if the run has ended."""
        return self._request("diagnose", extra_seconds=DIAGNOSIS_TIMEOUT_S)

    def _request(self, request: str, *, extra_seconds: float = 0.0) -> str:
        reply = send_request(self._directory.local_path, request, _REPLY_TIMEOUT_S + extra_seconds)
        if reply is not None and reply.error:
            raise RuntimeError(f"run {self.name!r} in {self.path}: {reply.error}")
        return "" if reply is None else reply.text

    def get_state(self) -> RunState:
        """Return the current state of the run."""
        return RunHistory.read(self._directory).make_state()

    def read_log(self, rank: int) -> str:
        """Return the output that a rank has written so far."""
        path = self._directory.get_log_path(rank)
        if path.exists():
            return path.read_text(errors="replace")
        return (self._directory.run_files.read(f"logs/{path.name}") or b"").decode(errors="replace")

    def get_outcome(self) -> RunOutcome:
        """Return the outcome of the run."""
        ended = EndedRun.find(self._directory)
        if ended is not None:
            return ended.get_outcome()
        error = ControllerError(
            "the process that hosted the run died, and its journal contains no end\n\nrun "
            f'directory: {self.path}\nTo resume from the latest checkpoint, set resume="auto".',
            path=self.path,
        )
        return RunOutcome(ControllerOutcome(error=error), RunState(status="failed"), None)
