"""The session of a rank whose function is a program: in the program's own process.

The rank's process has a session too, which passes on what this one says, and gives it the
controller's orders. It is opened by the first call of `report()` or its companions, so a script
that does not call them pays nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import pickle
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection

from drawbar.train._messages import Assignment, Message
from drawbar.train._orders import Interrupt, Order
from drawbar.train._serialization import serialize_without_references
from drawbar.train._worker.program_main import SESSION_VARIABLE
from drawbar.train._worker.session import Session

FLUSH_SECONDS = 2.0
"""How long checkpoints in flight may hold up the end of a program that has failed."""


@dataclass(frozen=True)
class Handover:
    """What the session in the program's process begins with."""

    assignment: Assignment
    collectives_called: int
    is_unshared: bool

    @classmethod
    def of(cls, session: Session) -> Handover:
        """Give what the rank's own session is at this moment."""
        spec = dataclasses.replace(session.assignment.spec, surroundings=None)
        assignment = dataclasses.replace(
            session.assignment, spec=spec, checkpoint=session.checkpoint
        )
        return cls(assignment, session.collectives.call_count, session.is_storage_node_local)


class RanksEnd:
    """The end of the wire in the rank's process."""

    def __init__(self, session: Session, descriptor: int) -> None:
        self._session = session
        self._wire = Connection(descriptor)
        self._is_open = False

    def fileno(self) -> int:
        """Give the descriptor that can be read when the program has said something."""
        return self._wire.fileno()

    def hear(self) -> bool:
        """Take the next thing that the program says; tells whether more can come."""
        try:
            said = self._wire.recv_bytes()
        except (OSError, EOFError):
            return False
        if said:
            self._session.forward(pickle.loads(said))
        else:
            self._wire.send_bytes(serialize_without_references(Handover.of(self._session)))
            self._is_open = True
        return True

    def obey(self, order: Order) -> None:
        """Give the program an order, if it takes any."""
        if self._is_open and not isinstance(order, Interrupt):  # it is ended by a signal
            with contextlib.suppress(OSError):
                self._wire.send_bytes(serialize_without_references(order))

    def close(self) -> None:
        """Hear nothing any more."""
        self._wire.close()


_opening = threading.Lock()
_opened: list[Session] = []


def program_session() -> Session | None:
    """Give the session of the program that this process is, or is a fork of; None if there is none.

    A fork has it to ask for its rank. What else it says is refused there, as in any fork.
    """
    if not _opened:
        pid, _, descriptor = os.environ.get(SESSION_VARIABLE, "").partition(":")
        if pid != str(os.getpid()):
            return None
        with _opening:
            if not _opened:
                _opened.append(_open(int(descriptor)))
    return _opened[0]


def _open(descriptor: int) -> Session:
    wire, speaking = Connection(descriptor), threading.Lock()

    def say(message: Message) -> None:
        with speaking:
            wire.send_bytes(serialize_without_references(message))

    # An empty message asks for the handover: a script that never reports costs its rank nothing.
    wire.send_bytes(b"")
    handover: Handover = pickle.loads(wire.recv_bytes())
    session = Session(handover.assignment, say, {})
    session.collectives.set_call_count(handover.collectives_called)
    if handover.is_unshared:
        session.use_node_local_storage()

    def listen() -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                session.obey(pickle.loads(wire.recv_bytes()))

    threading.Thread(target=listen, name="drawbar-orders", daemon=True).start()
    # A script ends without a word, with its last checkpoints on their way.
    atexit.register(_flush, session, os.getpid())
    return session


def _flush(session: Session, pid: int) -> None:
    """Let checkpoints that are on their way be committed before the process ends; not a fork."""
    if os.getpid() != pid:
        return
    if getattr(sys, "last_value", None) is None:
        session.uploads.async_commits.flush()
    else:
        session.close(FLUSH_SECONDS)
