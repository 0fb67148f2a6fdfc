"""A run in another process of this user's on this machine, as others there have it."""

from __future__ import annotations

import select
import socket
import weakref

from drawbar.train._controller.run import Ending, Outcome
from drawbar.train._errors import ControllerError
from drawbar.train._handle.ended_run import EndedRun
from drawbar.train._history.journal import events_of
from drawbar.train._history.timeline import Snapshot
from drawbar.train._launch.control import FOLLOW, ask, say
from drawbar.train._launch.host import DIAGNOSIS_SECONDS
from drawbar.train._storage.run_directory import RunDirectory

_ANSWER_SECONDS = 10.0


class NeighbourRun:
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
    def find(cls, directory: RunDirectory) -> NeighbourRun | None:
        """Give the run of a directory; None if no process of this user's hosts it here."""
        connection = say(directory.path, FOLLOW)
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
        return self._directory.location

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run is over; tells whether it is."""
        ended, _, _ = select.select([self._connection], [], [], timeout)
        return bool(ended)

    def stop(self, *, save: bool) -> None:
        """End the run in order: after its next commit, or now."""
        self._ask("stop" if save else "stop now")

    def kill(self) -> None:
        """End every process of the run at once."""
        self._ask("kill")

    def diagnose(self) -> str:
        """Say where every rank stands; "" if the run has ended meanwhile."""
        return self._ask("diagnose", more=DIAGNOSIS_SECONDS)

    def _ask(self, question: str, *, more: float = 0.0) -> str:
        answer = ask(self._directory.path, question, _ANSWER_SECONDS + more)
        if answer is not None and answer.error:
            raise RuntimeError(f"run {self.name!r} in {self.path}: {answer.error}")
        return "" if answer is None else answer.text

    def snapshot(self) -> Snapshot:
        """Say how the run stands."""
        return Snapshot.of(events_of(self._directory))

    def log(self, rank: int) -> str:
        """Give what a rank has written so far."""
        here = self._directory.log(rank)
        if here.exists():
            return here.read_text(errors="replace")
        return (self._directory.files.read(f"logs/{here.name}") or b"").decode(errors="replace")

    def ending(self) -> Ending:
        """Give how the run ended."""
        ended = EndedRun.find(self._directory)
        if ended is not None:
            return ended.ending()
        gone = ControllerError(
            "the process that hosted the run is gone, and its journal tells no end\n\nrun "
            f'directory: {self.path}\nresume="auto" goes on from the newest checkpoint',
            path=self.path,
        )
        return Ending(Outcome(error=gone), Snapshot(status="failed"), None)
