"""A socket by which other processes of this user, on this machine, reach a run that goes on.

It lies in a folder that this user alone may enter, not in the run's: that may be an object store,
or a path longer than a socket's may be. One line of JSON asks, one answers. Nothing of the run
depends on it: where it cannot be made, the run is merely not reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from drawbar.train._errors import CheckpointError
from drawbar.train._history.cleanup import is_dead_socket
from drawbar.train._storage.download_cache import get_user_temp_directory
from drawbar.train._threads import wait_to_accept_again

FOLLOW = "follow"
_ASKING_SECONDS = 5.0  # from connecting to having asked
_CLOSING_SECONDS = 1.0  # for the thread that listens

_logger = logging.getLogger("drawbar.train")


class Answer(msgspec.Struct, frozen=True):
    """What a run answers. `error` is "" if it did what it was asked."""

    text: str = ""
    error: str = ""


class Steered(Protocol):
    """What may be asked of a run."""

    def stop(self, *, save: bool) -> None:
        """End it in order."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def diagnose(self) -> str:
        """Say where every rank stands."""
        ...


def _name_of(run: Path) -> str:
    """Say how the names of a run's sockets begin, by the run's local path."""
    # By the real path: a run is reached by whatever path leads to it.
    digest = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]
    return f"run_{digest}"


class ControlSocket:
    """The socket of a run, until `close`. Who makes it holds the run's lock.

    Args:
        path: The run's local path.
        run: The run.
    """

    def __init__(self, path: Path, run: Steered) -> None:
        self._followers: list[socket.socket] = []
        self._questions: Mapping[str, Callable[[], str | None]] = {
            "stop": lambda: run.stop(save=True),
            "stop now": lambda: run.stop(save=False),
            "kill": run.kill,
            "diagnose": run.diagnose,
        }
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        self._listening = threading.Thread(target=self._listen, name="drawbar-control", daemon=True)
        self._path = path
        try:
            folder = get_user_temp_directory()
            for left in folder.glob("run_*.sock"):
                if is_dead_socket(left):  # of a process that was killed
                    left.unlink(missing_ok=True)
            # A name that no process has had: others may be removing those of the one before.
            unheard = folder / f"{_name_of(path)}_{uuid.uuid4().hex[:7]}"
            self._path = unheard.with_suffix(".sock")
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(str(unheard))
            self._socket.listen()
            unheard.rename(self._path)  # not before it listens
        except Exception as error:
            _logger.debug("other processes cannot reach the run: %s", error)
            self.close()
        else:
            self._listening.start()

    def close(self) -> None:
        """Stop answering. Connections of followers end, the sign that the run has ended."""
        self._closed.set()
        if self._socket is None:
            return
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        for each in (self._socket, *self._followers):
            with contextlib.suppress(OSError):  # a follower has gone
                each.shutdown(socket.SHUT_RDWR)  # also where a forked child has inherited it
            each.close()
        if self._listening.is_alive():
            self._listening.join(_CLOSING_SECONDS)

    def _listen(self) -> None:
        assert self._socket is not None  # it listens
        while not self._closed.is_set():
            try:
                asking, _ = self._socket.accept()
            except OSError as error:
                wait_to_accept_again(error, self._closed)
                continue
            # One thread per connection: a diagnosis takes seconds, and must not delay a stop.
            threading.Thread(
                target=self._answer, args=(asking,), name="drawbar-answer", daemon=True
            ).start()

    def _answer(self, asking: socket.socket) -> None:
        with contextlib.suppress(OSError):  # who asked has gone
            # Who connects and asks nothing would hold the thread for as long as the run goes on.
            asking.settimeout(_ASKING_SECONDS)
            with asking.makefile("rb") as lines:
                question = lines.readline().decode(errors="replace").strip()
            if question == FOLLOW:
                self._followers.append(asking)
                return
            asking.sendall(msgspec.json.encode(self._answer_to(question)) + b"\n")
        asking.close()

    def _answer_to(self, question: str) -> Answer:
        answer = self._questions.get(question)
        if answer is None:
            return Answer(error=f"this run does not know {question!r}: its Drawbar is another one")
        try:
            return Answer(answer() or "")
        except Exception as error:
            return Answer(error=f"{type(error).__name__}: {error}")


def ask(run: Path, question: str, timeout: float) -> Answer | None:
    """Ask the run that goes on at a local path; None if no process of this user's hosts it here.

    Raises:
        TimeoutError: It has not answered after so many seconds.
    """
    asking = say(run, question)
    if asking is None:
        return None
    asking.settimeout(timeout)
    try:
        with asking, asking.makefile("rb") as lines:
            return msgspec.json.decode(lines.readline(), type=Answer)
    except TimeoutError:
        raise TimeoutError(
            f"the process that hosts the run in {run} has not answered for {timeout:g} s: it is "
            "stopped, or busy"
        ) from None
    except (OSError, msgspec.DecodeError):  # it has ended meanwhile
        return None


def say(run: Path, question: str) -> socket.socket | None:
    """Say something to the run at a local path, and give the connection; None if it is not here.

    With `FOLLOW`, the connection ends when the run does, and not before.
    """
    with contextlib.suppress(OSError, CheckpointError):
        for path in get_user_temp_directory().glob(f"{_name_of(run)}_*.sock"):
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(path))
                connection.sendall(question.encode() + b"\n")
            except OSError:  # it is that of a process that was killed
                connection.close()
            else:
                return connection
    return None
