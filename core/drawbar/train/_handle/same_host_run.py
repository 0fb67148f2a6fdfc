"""A run in another process of this user's on this machine, as others there have it."""

from __future__ import annotations

import select
import socket
import weakref

from drawbar.train._controller.run import ControllerOutcome, RunOutcome
from drawbar.train._driver.control import FOLLOW, ask, say
from drawbar.train._driver.controller_thread import DIAGNOSIS_TIMEOUT_S
from drawbar.train._errors import ControllerError
from drawbar.train._handle.ended_run import EndedRun
from drawbar.train._history.journal import read_events
from drawbar.train._history.timeline import RunState
from drawbar.train._storage.run_directory import RunDirectory

_REPLY_TIMEOUT_S = 10.0


class SameHostRun:
    """What `RunHandle` asks of a run, asked of its process, and of its directory.

    Use `find`: it tells whether there is one.
    """

    detached = True  # whoever waits for it may leave: it goes on

    def __init__(self, directory: RunDirectory, connection: socket.socket) -> None:
        self._directory = directory
        self._connection = connection
        # Whoever forgets the handle must not stay among the run's followers.
        weakref.finalize(self, connection.close)

    @classmethod
    def find(cls, directory: RunDirectory) -> SameHostRun | None:
        """Give the run of a directory; None if no process of this user's hosts it here."""
        connection = say(directory.local_path, FOLLOW)
        return None if connection is None else cls(directory, connection)

    @property
    def silence(self) -> str:
        """Who does not answer is told of where he is asked."""
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
        """Wait until the run is over; tells whether it is."""
        ended, _, _ = select.select([self._connection], [], [], timeout)
        return bool(ended)

    def stop(self, *, save: bool) -> None:
        """End the run in order: after its next commit, or now."""
        self._request("stop" if save else "stop now")

    def kill(self) -> None:
        """End every process of the run at once."""
        self._request("kill")

    def diagnose(self) -> str:
        """Say where every rank stands; "" if the run has ended meanwhile."""
        return self._request("diagnose", extra_seconds=DIAGNOSIS_TIMEOUT_S)

    def _request(self, request: str, *, extra_seconds: float = 0.0) -> str:
        answer = ask(self._directory.local_path, request, _REPLY_TIMEOUT_S + extra_seconds)
        if answer is not None and answer.error:
            raise RuntimeError(f"run {self.name!r} in {self.path}: {answer.error}")
        return "" if answer is None else answer.text

    def snapshot(self) -> RunState:
        """Say how the run stands."""
        return RunState.from_events(read_events(self._directory))

    def read_log(self, rank: int) -> str:
        """Give what a rank has written so far."""
        here = self._directory.get_log_path(rank)
        if here.exists():
            return here.read_text(errors="replace")
        return (self._directory.run_files.read(f"logs/{here.name}") or b"").decode(errors="replace")

    def ending(self) -> RunOutcome:
        """Give how the run ended."""
        ended = EndedRun.find(self._directory)
        if ended is not None:
            return ended.ending()
        gone = ControllerError(
            "the process that hosted the run is gone, and its journal tells no end\n\nrun "
            f'directory: {self.path}\nresume="auto" goes on from the newest checkpoint',
            path=self.path,
        )
        return RunOutcome(ControllerOutcome(error=gone), RunState(status="failed"), None)
