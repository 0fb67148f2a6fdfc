"""Connections between rank 0 and the other processes of a torchrun group.

Rank 0 listens on a port and puts its address and a random key into the store of the launcher.
Messages are unpickled, but only from processes that have proved that they know the key.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import secrets
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, TypedDict

from drawbar.train._config.backend import LauncherStore
from drawbar.train._errors import ControllerError
from drawbar.train._protocol.assignment import Ranks, WorkerAssignment, WorkerInfo
from drawbar.train._protocol.commands import Command
from drawbar.train._protocol.messages import Message
from drawbar.train._serialization import Serialized, serialize
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._threads import wait_to_accept_again
from drawbar.train._worker.addresses import LOOPBACK, get_node_address
from drawbar.train._worker.stack import Stack


@dataclass(frozen=True)
class Hello:
    """First message of a peer."""

    rank: int
    info: WorkerInfo


@dataclass(frozen=True)
class Opened:
    """Reply to `Hello`: the run is open."""

    directory: RunDirectory


@dataclass(frozen=True)
class Begin:
    """Command to start an attempt."""

    assignment: WorkerAssignment


@dataclass(frozen=True)
class Obey:
    """Command for the session of an attempt. Ignored if it is for an earlier attempt."""

    attempt: int
    order: Command


@dataclass(frozen=True)
class StackAsked:
    """Request for the stacks of the threads of this process."""

    number: int


@dataclass(frozen=True)
class Execute:
    """Request to call a serialized (function, args, kwargs) for a backend."""

    number: int
    call: Serialized

    def answer(self) -> Answer:
        """Call the function and return its result or its traceback."""
        try:
            function, args, kwargs = self.call.deserialize()
            return Answer(self.number, serialize(function(*args, **kwargs)))
        except Exception:
            return Answer(self.number, error=traceback.format_exc())


@dataclass(frozen=True)
class Over:
    """Command to end the run, with the pickled `RunOutcome`. It is the last one."""

    ending: bytes


@dataclass(frozen=True)
class Said:
    """Message of the training function."""

    message: Message


@dataclass(frozen=True)
class Ended:
    """End of the training function, with None after a Ctrl-C, which is not a failure."""

    message: Message | None


@dataclass(frozen=True)
class Answer:
    """Reply to a request: a stack, a serialized value, or an error."""

    number: int
    value: Stack | Serialized | None = None
    error: str = ""


@dataclass(frozen=True)
class StopAsked:
    """Request of a peer to stop the run."""

    save: bool


@dataclass(frozen=True)
class Lost:
    """Stands in for further messages of a peer whose process died."""

    detail: str


FromPeer = Said | Ended | Answer | StopAsked | Lost
ToPeer = Begin | Obey | StackAsked | Execute | Over


class Invitation(TypedDict, total=False):
    """Entry of rank 0 in the store: its address, or the error that prevented the run."""

    host: str
    port: int
    key: str
    refused: str


class Wire:
    """A connection on which any thread sends and one thread receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, thing: object) -> None:
        """Send an object. A broken connection is reported where this side receives."""
        # Outside the lock and `suppress`: an object that cannot be pickled is an error of the
        # caller.
        data = pickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending, contextlib.suppress(OSError):
            self._connection.send_bytes(data)

    def receive(self) -> Any:
        """Wait for the next object and return it.

        Raises:
            EOFError: The other side closed the connection.
            OSError: The connection is broken.
        """
        return pickle.loads(self._connection.recv_bytes())

    def close(self) -> None:
        """Close this side."""
        self._connection.close()


@dataclass
class Peers:
    """Connections of rank 0 to its peers.

    Args:
        count: Number of peers.
        host: Address to listen on.

    Attributes:
        infos: Node and process of each peer that has connected, by rank.
    """

    count: int
    host: str
    infos: dict[int, WorkerInfo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Objects are unpickled, so a process that reaches the port could run code here. The
        # launcher shares the key only with its own processes.
        self._key = secrets.token_bytes(32)
        self._listener = Listener((self.host, 0), authkey=self._key)
        self._wires: dict[int, Wire] = {}
        self._came = threading.Condition()
        self._closed = threading.Event()
        self._heard: Future[Callable[[int, FromPeer], object]] = Future()

    def hear(self, handler: Callable[[int, FromPeer], object]) -> None:
        """Set the handler of messages. It is called in one thread per peer.

        Messages that arrived before are handled now.

        Args:
            handler: Called with the rank of a peer and its message.
        """
        self._heard.set_result(handler)

    def invite(self, store: LauncherStore, key: str, directory: RunDirectory) -> None:
        """Publish the address of rank 0, so that the peers join the run."""
        # Accept before the address is published: a peer that reads it connects at once.
        accept = threading.Thread(
            target=self._accept, args=(directory,), name="drawbar-peers", daemon=True
        )
        accept.start()
        host, port = self._listener.address
        store.set(key, json.dumps({"host": host, "port": port, "key": self._key.hex()}))

    def refuse(self, store: LauncherStore, key: str, error: Exception) -> None:
        """Publish the error that prevented the run."""
        self._closed.set()
        self._listener.close()
        store.set(key, json.dumps({"refused": f"{type(error).__name__}: {error}"}))

    def wait(self, seconds: float) -> int:
        """Wait up to `seconds` for all peers to join and return how many have joined."""
        with self._came:
            self._came.wait_for(lambda: len(self.infos) == self.count, seconds)
            return len(self.infos)

    def send(self, rank: int, thing: ToPeer) -> None:
        """Send a command to one peer."""
        self._wires[rank].send(thing)

    def send_all(self, thing: ToPeer) -> None:
        """Send a command to all peers that have joined."""
        for wire in list(self._wires.values()):
            wire.send(thing)

    def _accept(self, directory: RunDirectory) -> None:
        with self._listener:
            while len(self._wires) < self.count and not self._closed.is_set():
                # The loop must survive port scanners and peers that die while they connect.
                try:
                    wire = Wire(self._listener.accept())
                    hello = wire.receive()
                except (EOFError, AuthenticationError):
                    continue
                except OSError as error:
                    wait_to_accept_again(error, self._closed)
                    continue
                wire.send(Opened(directory))
                self._wires[hello.rank] = wire
                threading.Thread(target=self._listen, args=(wire, hello), daemon=True).start()

    def _listen(self, wire: Wire, hello: Hello) -> None:
        with self._came:
            self.infos[hello.rank] = hello.info
            self._came.notify_all()
        handler = self._heard.result()
        try:
            while True:
                handler(hello.rank, wire.receive())
        except (EOFError, OSError) as error:
            handler(hello.rank, Lost(f"its connection to rank 0 ended: {error or 'closed'}"))


def meet_rank_zero(store: LauncherStore, key: str, hello: Hello) -> tuple[Wire, RunDirectory]:
    """Connect to rank 0 as soon as it has opened the run.

    Args:
        store: Store of the launcher.
        key: Key under which rank 0 publishes its address.
        hello: First message to send.

    Returns:
        The connection, and the directory of the run.

    Raises:
        ControllerError: Rank 0 could not open the run.
        EOFError: Rank 0 has closed the connection.
        OSError: Rank 0 cannot be reached.
    """
    invitation: Invitation = json.loads(store.get(key))
    if "refused" in invitation:
        raise ControllerError(f"rank 0 cannot open the run: {invitation['refused']}")
    address = (invitation["host"], invitation["port"])
    wire = Wire(Client(address, authkey=bytes.fromhex(invitation["key"])))
    wire.send(hello)
    opened: Opened = wire.receive()
    return wire, opened.directory


def peer_address(ranks: Ranks) -> str:
    """Return the address at which the other ranks reach this process."""
    return LOOPBACK if ranks.local_world_size == ranks.world_size else get_node_address()
