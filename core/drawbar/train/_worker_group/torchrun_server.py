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
class PeerHello:
    """First message of a peer."""

    rank: int
    info: WorkerInfo


@dataclass(frozen=True)
class RunOpened:
    """Reply to `PeerHello`: the run is open."""

    directory: RunDirectory


@dataclass(frozen=True)
class StartAttempt:
    """Command to start an attempt."""

    assignment: WorkerAssignment


@dataclass(frozen=True)
class HandleCommand:
    """Command for the session of an attempt. Ignored if it is for an earlier attempt."""

    attempt: int
    command: Command


@dataclass(frozen=True)
class CaptureStack:
    """Request for the stacks of the threads of this process."""

    request_id: int


@dataclass(frozen=True)
class ExecuteFunction:
    """Request to call a serialized (function, args, kwargs) for a backend."""

    request_id: int
    call: Serialized

    def run(self) -> PeerReply:
        """Call the function and return its result or its traceback."""
        try:
            function, args, kwargs = self.call.deserialize()
            return PeerReply(self.request_id, serialize(function(*args, **kwargs)))
        except Exception:
            return PeerReply(self.request_id, error=traceback.format_exc())


@dataclass(frozen=True)
class EndRun:
    """Command to end the run, with the pickled `RunOutcome`. It is the last one."""

    outcome: bytes


@dataclass(frozen=True)
class MessageSent:
    """Message of the training function."""

    message: Message


@dataclass(frozen=True)
class FunctionEnded:
    """End of the training function, with None after a Ctrl-C, which is not a failure."""

    message: Message | None


@dataclass(frozen=True)
class PeerReply:
    """Reply to a request: a stack, a serialized value, or an error."""

    request_id: int
    value: Stack | Serialized | None = None
    error: str = ""


@dataclass(frozen=True)
class StopRequested:
    """Request of a peer to stop the run."""

    save: bool


@dataclass(frozen=True)
class PeerLost:
    """The process of a peer died, or its connection broke. No further messages follow."""

    detail: str


PeerMessage = MessageSent | FunctionEnded | PeerReply | StopRequested | PeerLost
PeerCommand = StartAttempt | HandleCommand | CaptureStack | ExecuteFunction | EndRun


class ServerAddress(TypedDict, total=False):
    """Entry of rank 0 in the store: its address, or the error that prevented the run."""

    host: str
    port: int
    key: str
    error: str


class PeerConnection:
    """A connection on which any thread sends and one thread receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send an object. A broken connection is reported where this side receives."""
        # Outside the lock and `suppress`: an object that cannot be pickled is an error of the
        # caller.
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        with self._send_lock, contextlib.suppress(OSError):
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
class TorchrunServer:
    """Connections of rank 0 to its peers.

    Args:
        count: Number of peers.
        host: Address to listen on.

    Attributes:
        worker_infos: Node and process of each peer that has connected, by rank.
    """

    count: int
    host: str
    worker_infos: dict[int, WorkerInfo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Objects are unpickled, so a process that reaches the port could run code here. The
        # launcher shares the key only with its own processes.
        self._key = secrets.token_bytes(32)
        self._listener = Listener((self.host, 0), authkey=self._key)
        self._connections: dict[int, PeerConnection] = {}
        self._joined = threading.Condition()
        self._closed = threading.Event()
        self._handler: Future[Callable[[int, PeerMessage], object]] = Future()

    def set_handler(self, handler: Callable[[int, PeerMessage], object]) -> None:
        """Set the handler of messages. It is called in one thread per peer.

        Messages that arrived before are handled now.

        Args:
            handler: Called with the rank of a peer and its message.
        """
        self._handler.set_result(handler)

    def publish_address(self, store: LauncherStore, key: str, directory: RunDirectory) -> None:
        """Publish the address of rank 0, so that the peers join the run."""
        # Accept before the address is published: a peer that reads it connects at once.
        accept = threading.Thread(
            target=self._accept, args=(directory,), name="drawbar-peers", daemon=True
        )
        accept.start()
        host, port = self._listener.address
        store.set(key, json.dumps({"host": host, "port": port, "key": self._key.hex()}))

    def publish_error(self, store: LauncherStore, key: str, error: Exception) -> None:
        """Publish the error that prevented the run."""
        self._closed.set()
        self._listener.close()
        store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))

    def wait_for_peers(self, timeout: float) -> int:
        """Wait up to `timeout` seconds for all peers to join and return how many have joined."""
        with self._joined:
            self._joined.wait_for(lambda: len(self.worker_infos) == self.count, timeout)
            return len(self.worker_infos)

    def send(self, rank: int, command: PeerCommand) -> None:
        """Send a command to one peer."""
        self._connections[rank].send(command)

    def broadcast(self, command: PeerCommand) -> None:
        """Send a command to all peers that have joined."""
        for connection in list(self._connections.values()):
            connection.send(command)

    def _accept(self, directory: RunDirectory) -> None:
        with self._listener:
            while len(self._connections) < self.count and not self._closed.is_set():
                # The loop must survive port scanners and peers that die while they connect.
                try:
                    connection = PeerConnection(self._listener.accept())
                    hello = connection.receive()
                except (EOFError, AuthenticationError):
                    continue
                except OSError as error:
                    wait_to_accept_again(error, self._closed)
                    continue
                connection.send(RunOpened(directory))
                self._connections[hello.rank] = connection
                threading.Thread(target=self._listen, args=(connection, hello), daemon=True).start()

    def _listen(self, connection: PeerConnection, hello: PeerHello) -> None:
        with self._joined:
            self.worker_infos[hello.rank] = hello.info
            self._joined.notify_all()
        handler = self._handler.result()
        try:
            while True:
                handler(hello.rank, connection.receive())
        except (EOFError, OSError) as error:
            handler(hello.rank, PeerLost(f"its connection to rank 0 ended: {error or 'closed'}"))


def connect_to_rank_zero(
    store: LauncherStore, key: str, hello: PeerHello
) -> tuple[PeerConnection, RunDirectory]:
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
    server_address: ServerAddress = json.loads(store.get(key))
    if "error" in server_address:
        raise ControllerError(f"rank 0 cannot open the run: {server_address['error']}")
    address = (server_address["host"], server_address["port"])
    connection = PeerConnection(Client(address, authkey=bytes.fromhex(server_address["key"])))
    connection.send(hello)
    opened: RunOpened = connection.receive()
    return connection, opened.directory


def get_peer_address(ranks: Ranks) -> str:
    """Return the address at which the other ranks reach this process."""
    return LOOPBACK if ranks.local_world_size == ranks.world_size else get_node_address()
