"""Session of a rank in the process of its program.

The session in the worker process forwards the messages of this one and passes commands to it. It is
opened on the first call of `report()` or a related function, so scripts that do not call them have
no overhead.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import pickle
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from drawbar._modes.connection import Connection
from drawbar._modes.program_main import SESSION_VARIABLE
from drawbar._process.serialization import serialize_without_references
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.commands import (
    COMMANDS,
    Command,
    InterruptFunction,
    RequestAgreed,
    RequestAnnounced,
)
from drawbar.train._protocol.messages import MESSAGES, Message
from drawbar.train._worker.session import FAILURE_FLUSH_S, Session


@dataclass(frozen=True)
class SessionInit:
    """Initial state of the session in the program's process."""

    assignment: WorkerAssignment
    num_collective_calls: int
    num_request_calls: int
    start_time: float
    request_commands: Sequence[RequestAnnounced | RequestAgreed]
    is_storage_node_local: bool

    @classmethod
    def from_session(cls, session: Session) -> SessionInit:
        """Capture the current state of the session in the worker process."""
        spec = dataclasses.replace(session.assignment.spec, driver_env=None)
        assignment = dataclasses.replace(
            session.assignment, spec=spec, resume_checkpoint=session.checkpoint
        )
        return cls(
            assignment,
            session.collectives.call_count,
            session.requests.call_count,
            session.timer.start_time,
            session.requests.get_commands(),
            session.is_storage_node_local,
        )


class RankConnection:
    """Connection to the program, in the worker process.

    Args:
        session: Session of the worker process.
        connected: Socket of the session, which this object closes.
    """

    def __init__(self, session: Session, connected: socket.socket) -> None:
        self._session = session
        self._connection = Connection(connected)
        self._is_open = False
        self._open_lock = threading.Lock()  # no command is missed between the two sessions

    def fileno(self) -> int:
        """Return the descriptor, which becomes readable when the program has sent a message."""
        return self._connection.fileno()

    def receive(self) -> bool:
        """Handle the next message of the program and return whether the connection is open."""
        try:
            data = self._connection.receive()
        except (OSError, EOFError):
            return False
        if data:
            self._session.forward(MESSAGES.decode(data))
        else:
            # Pickled, because it contains user objects. The program trusts this process.
            with self._open_lock:
                session_init = SessionInit.from_session(self._session)
                self._connection.send(serialize_without_references(session_init))
                self._is_open = True
        return True

    def send_command(self, command: Command) -> None:
        """Send a command to the program, if it has opened a session.

        Otherwise, the session of this process replies to requests: the program may open its session
        later, or never.
        """
        with self._open_lock:
            # An interrupt is sent as a signal instead.
            if self._is_open and not isinstance(command, InterruptFunction):
                self._connection.send(COMMANDS.encode(command))
            elif isinstance(command, RequestAnnounced | RequestAgreed):
                self._session.requests.handle_command(command)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


_connect_lock = threading.Lock()
_sessions: list[Session] = []


def get_program_session() -> Session | None:
    """Return the session of this process if it is a program or a fork of one, else None.

    A fork uses it to query its rank. Every other use in a fork raises an error.
    """
    if not _sessions:
        pid, _, descriptor = os.environ.get(SESSION_VARIABLE, "").partition(":")
        if pid != str(os.getpid()):
            return None
        with _connect_lock:
            if not _sessions:
                _sessions.append(_connect(int(descriptor)))
    return _sessions[0]


def _connect(descriptor: int) -> Session:
    connection = Connection(socket.socket(fileno=descriptor))

    def send(message: Message) -> None:
        connection.send(MESSAGES.encode(message))

    # An empty message requests the session's state: a script that never reports costs nothing.
    connection.send(b"")
    session_init: SessionInit = pickle.loads(connection.receive())
    session = Session(session_init.assignment, send, {})
    session.timer.start(session_init.start_time)  # the imports of the script count, too
    session.collectives.set_call_count(session_init.num_collective_calls)
    session.requests.restore(session_init.num_request_calls, session_init.request_commands)
    if session_init.is_storage_node_local:
        session.use_node_local_storage()

    def receive_commands() -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                session.handle_command(COMMANDS.decode(connection.receive()))

    threading.Thread(target=receive_commands, name="drawbar-commands", daemon=True).start()
    # A script may end while its last checkpoints are still in flight.
    atexit.register(_flush_at_exit, session, os.getpid())
    return session


def _flush_at_exit(session: Session, pid: int) -> None:
    """Wait for checkpoints in flight before the process ends; do nothing in a fork."""
    if os.getpid() != pid:
        return
    session.send(session.timer.observe())
    session.progress.flush()
    if getattr(sys, "last_value", None) is None:
        session.uploads.async_commits.flush()
    else:
        session.close(FAILURE_FLUSH_S)
