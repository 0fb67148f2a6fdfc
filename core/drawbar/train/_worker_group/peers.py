"""How the processes of a launcher's group talk to rank 0's, which hosts their run.

Rank 0 listens, and puts its address and a key of its own making into the launcher's store. What
comes over the wire is unpickled, but only of whoever has proved that it knows the key.
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
from drawbar.train._messages import Assignment, Message, Ranks, WorkerInfo
from drawbar.train._orders import Order
from drawbar.train._serialization import Serialized, serialize
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._threads import wait_to_accept_again
from drawbar.train._worker.addresses import LOOPBACK, get_node_address
from drawbar.train._worker.stack import Stack


@dataclass(frozen=True)
class Hello:
    """The first thing that a peer says."""

    rank: int
    info: WorkerInfo


@dataclass(frozen=True)
class Opened:
    """The answer to `Hello`: the run is open."""

    directory: RunDirectory


@dataclass(frozen=True)
class Begin:
    """Run an attempt."""

    assignment: Assignment


@dataclass(frozen=True)
class Obey:
    """Take an order, if it is of this attempt."""

    attempt: int
    order: Order


@dataclass(frozen=True)
class StackAsked:
    """Say where the threads of this process stand."""

    number: int


@dataclass(frozen=True)
class Execute:
    """Run a packed (function, args, kwargs) for a backend."""

    number: int
    call: Serialized

    def answer(self) -> Answer:
        """Do it; gives what came of it, whatever that is."""
        try:
            function, args, kwargs = self.call.deserialize()
            return Answer(self.number, serialize(function(*args, **kwargs)))
        except Exception:
            return Answer(self.number, error=traceback.format_exc())


@dataclass(frozen=True)
class Over:
    """The run has ended; `ending` is the packed `Ending`. Nothing comes after it."""

    ending: bytes


@dataclass(frozen=True)
class Said:
    """A message of the training function."""

    message: Message


@dataclass(frozen=True)
class Ended:
    """The function has ended; None after a Ctrl-C, which is no failure."""

    message: Message | None


@dataclass(frozen=True)
class Answer:
    """What was asked under this number: a stack, a packed value, or why there is none."""

    number: int
    value: Stack | Serialized | None = None
    error: str = ""


@dataclass(frozen=True)
class StopAsked:
    """The peer asks for the end of the run."""

    save: bool


@dataclass(frozen=True)
class Lost:
    """Stands for what a peer says no more: its process is gone."""

    detail: str


FromPeer = Said | Ended | Answer | StopAsked | Lost
ToPeer = Begin | Obey | StackAsked | Execute | Over


class Invitation(TypedDict, total=False):
    """What rank 0 puts into the launcher's store: how it is reached, or why there is no run."""

    host: str
    port: int
    key: str
    refused: str


class Wire:
    """A connection. Any thread sends, one receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, thing: object) -> None:
        """Send something; if nobody receives any more, that shows where this side receives."""
        # Outside the lock, and outside `suppress`: what does not pickle is an error of the caller.
        data = pickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL)
        with self._sending, contextlib.suppress(OSError):
            self._connection.send_bytes(data)

    def receive(self) -> Any:
        """Wait for something.

        Raises:
            EOFError, OSError: The other side is gone.
        """
        return pickle.loads(self._connection.recv_bytes())

    def close(self) -> None:
        """Close this side."""
        self._connection.close()


@dataclass
class Peers:
    """The peers, as the process of rank 0 has them.

    Args:
        count: How many there are.
        host: The address to listen at.

    Attributes:
        infos: Where those are that have come.
    """

    count: int
    host: str
    infos: dict[int, WorkerInfo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # What comes in is unpickled, so whoever can reach the port could run code here; the
        # launcher shares the key with its own processes only.
        self._key = secrets.token_bytes(32)
        self._listener = Listener((self.host, 0), authkey=self._key)
        self._wires: dict[int, Wire] = {}
        self._came = threading.Condition()
        self._closed = threading.Event()
        self._heard: Future[Callable[[int, FromPeer], object]] = Future()

    def hear(self, what: Callable[[int, FromPeer], object]) -> None:
        """From now on, call this with a peer's rank and what it says, in a thread of that peer's.

        What they have said before waits until then.
        """
        self._heard.set_result(what)

    def invite(self, store: LauncherStore, key: str, directory: RunDirectory) -> None:
        """Have them come to the run that is open now."""
        # Before the address is known: who reads it connects at once.
        accept = threading.Thread(
            target=self._accept, args=(directory,), name="drawbar-peers", daemon=True
        )
        accept.start()
        host, port = self._listener.address
        store.set(key, json.dumps({"host": host, "port": port, "key": self._key.hex()}))

    def refuse(self, store: LauncherStore, key: str, error: Exception) -> None:
        """Publish why there is no run."""
        self._closed.set()
        self._listener.close()
        store.set(key, json.dumps({"refused": f"{type(error).__name__}: {error}"}))

    def wait(self, seconds: float) -> int:
        """Wait until all have come, but not longer than that; gives how many have."""
        with self._came:
            self._came.wait_for(lambda: len(self.infos) == self.count, seconds)
            return len(self.infos)

    def send(self, rank: int, thing: ToPeer) -> None:
        """Tell one something."""
        self._wires[rank].send(thing)

    def send_all(self, thing: ToPeer) -> None:
        """Tell all who have come something."""
        for wire in list(self._wires.values()):
            wire.send(thing)

    def _accept(self, directory: RunDirectory) -> None:
        with self._listener:
            while len(self._wires) < self.count and not self._closed.is_set():
                # Neither a port scanner nor a peer that dies while it connects ends the loop.
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
        hear = self._heard.result()
        try:
            while True:
                hear(hello.rank, wire.receive())
        except (EOFError, OSError) as error:
            hear(hello.rank, Lost(f"its connection to rank 0 ended: {error or 'closed'}"))


def meet_rank_zero(store: LauncherStore, key: str, hello: Hello) -> tuple[Wire, RunDirectory]:
    """Go to the process of rank 0, once that has opened the run; gives the run's directory.

    Raises:
        ControllerError: It could not open the run.
        OSError, EOFError: It is gone already.
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
    """Give the address at which the other ranks reach this process."""
    return LOOPBACK if ranks.local_world_size == ranks.world_size else get_node_address()
