"""Connections between rank 0 and the other processes of a torchrun group.

Rank 0 listens on a port and puts its address and a random key into the store of the launcher. Both
sides of a connection prove that they know the key before they send messages.

A peer has two connections: one for its messages and one for the commands of rank 0. If a process
ends and has not read all data of a TCP connection, the system resets the connection and discards
data that it has sent. The connection for messages has no data to read, so rank 0 receives all
messages of a process that ends at any time, also by SIGKILL.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import pickle
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from drawbar._base.wording import format_ranks
from drawbar._modes.connection import (
    Connection,
    authenticate_client,
    authenticate_server,
)
from drawbar._modes.torchrun_messages import (
    COMMANDS,
    HELLO,
    MESSAGES,
    PeerCommand,
    PeerHello,
    PeerMessage,
    ReceivedMessage,
    RunOpened,
)
from drawbar._process.codec import ProtocolError
from drawbar._process.errors import ControllerError
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.threads import wait_to_accept_again
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._config.backend import LauncherStore
from drawbar.train._protocol.messages import WorkerDied
from drawbar.train._worker.context import LOOPBACK, get_node_address

JOIN_SECONDS = 1800.0
"""Time in which all ranks must join, which is torch's default time limit of a process group."""

HANDSHAKE_SECONDS = 10.0
"""Time after which rank 0 closes a connection that has not become a peer."""

MAX_HANDSHAKES = 64
"""Maximum number of connections that are not peers yet. Others wait until one is closed."""

SPARE_DESCRIPTORS = 512
"""Descriptors of rank 0 that are not connections."""

MAX_HELLO_BYTES = 1 << 16
CONNECT_SECONDS = 60.0
BACKLOG = 1024

_logger = logging.getLogger("drawbar.train")


class ServerAddress(TypedDict, total=False):
    """Entry of rank 0 in the store: its address, or the error that prevented the run."""

    host: str
    port: int
    key: str
    error: str


class _CommandConnection(NamedTuple):
    """Connection for commands of a peer, accepted as number `order`, from the start of rank 0."""

    connection: Connection
    token: str  # the one in the peer's `PeerHello`
    order: int


class RankZeroConnection:
    """Connections of a peer to rank 0. Any thread sends, and one thread receives.

    Args:
        messages: Connection for messages of the peer.
        commands: Connection for commands of rank 0.
    """

    def __init__(self, messages: Connection, commands: Connection) -> None:
        self._messages = messages
        self._commands = commands

    def send(self, message: PeerMessage) -> None:
        """Send a message.

        Raises:
            ProtocolError: The message is too large.
        """
        self._messages.send(MESSAGES.encode(message))

    def receive(self) -> PeerCommand:
        """Wait for the next command and return it.

        Raises:
            EOFError: Rank 0 closed the connection.
            OSError: The connection is broken.
        """
        return COMMANDS.decode(self._commands.receive())

    def close(self) -> None:
        """Close this side."""
        self._messages.close()
        self._commands.close()


@dataclass
class TorchrunServer:
    """Connections of rank 0 to its peers.

    Each connection for messages has a thread, so one that sends nothing does not delay the others.

    Args:
        count: Number of peers.
        host: Address to listen on.
        handshake_seconds: Time after which a connection that has not become a peer is closed.
        join_seconds: Time in which all peers must join.

    Attributes:
        worker_infos: Node and process of each peer that has connected, by rank.
    """

    count: int
    host: str
    handshake_seconds: float = HANDSHAKE_SECONDS
    join_seconds: float = JOIN_SECONDS
    worker_infos: dict[int, WorkerInfo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._join_deadline = time.monotonic() + self.join_seconds
        # The launcher shares the key only with its own processes.
        self._key = secrets.token_bytes(32)
        _raise_descriptor_limit(2 * self.count + SPARE_DESCRIPTORS)
        self._listener = _listen_on_free_port(self.host)
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        # By rank, also of peers that have not joined.
        self._command_connections: dict[int, _CommandConnection] = {}
        self._joined = threading.Condition()
        self._closed = threading.Event()
        self._handler: Future[Callable[[int, ReceivedMessage], object]] = Future()

    def set_handler(self, handler: Callable[[int, ReceivedMessage], object]) -> None:
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
        host, port = self._listener.getsockname()[:2]
        store.set(key, json.dumps({"host": host, "port": port, "key": self._key.hex()}))

    def publish_error(self, store: LauncherStore, key: str, error: Exception) -> None:
        """Publish the error that prevented the run."""
        self.stop_listening()
        store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))

    def wait_for_peers(self, timeout: float) -> int:
        """Wait up to `timeout` seconds for all peers to join and return how many have joined.

        Raises:
            ControllerError: Some have not joined in time.
        """
        with self._joined:
            self._joined.wait_for(lambda: len(self.worker_infos) == self.count, timeout)
            missing = sorted(set(range(1, self.count + 1)) - self.worker_infos.keys())
        if missing and time.monotonic() > self._join_deadline:
            raise ControllerError(
                f"not all of the {self.count + 1} ranks have called fit() within "
                f"{self.join_seconds:g} s: {format_ranks(missing)} did not. See the output of "
                "these processes, and start all ranks again"
            )
        return self.count - len(missing)

    def send(self, ranks: Iterable[int], command: PeerCommand) -> None:
        """Send a command to peers. It is encoded once, and not sent to lost peers."""
        data = COMMANDS.encode(command)
        with self._joined:
            peers = [self._command_connections.get(rank) for rank in ranks]
        for peer in peers:
            if peer is not None:
                peer.connection.send(data)

    def end(self, command: PeerCommand) -> None:
        """Send the last command to all peers that have joined, and reject the others."""
        self.stop_listening()
        with self._joined:
            ranks = list(self._command_connections)
        self.send(ranks, command)

    def stop_listening(self) -> None:
        """Reject processes that have not joined yet."""
        self._closed.set()
        # Without it, a thread in `accept()` would keep the port open.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self, directory: RunDirectory) -> None:
        opened = COMMANDS.encode(RunOpened(pickle.dumps(directory)))
        for order in itertools.count():
            if self._closed.is_set():
                return
            self._handshakes.acquire()
            # The loop must survive port scanners and peers that die while they connect.
            try:
                accepted, _ = self._listener.accept()
                threading.Thread(
                    target=self._serve,
                    args=(accepted, order, opened),
                    name="drawbar-peer",
                    daemon=True,
                ).start()
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                self._handshakes.release()
                wait_to_accept_again(error, self._closed)

    def _serve(self, accepted: socket.socket, order: int, opened: bytes) -> None:
        try:
            connection, hello = self._admit(accepted, order, opened)
        except (ProtocolError, EOFError, OSError) as error:
            _logger.debug("a connection to rank 0 was rejected: %s", error)
            accepted.close()
            return
        finally:
            self._handshakes.release()
        if hello.direction == "messages":
            self._receive_messages(connection, hello.rank)
        else:
            self._close_unless_joined(connection, hello.rank)

    def _close_unless_joined(self, commands: Connection, rank: int) -> None:
        """Close a connection for commands if the one for messages does not follow in time."""

        def is_settled() -> bool:
            peer = self._command_connections.get(rank)
            return rank in self.worker_infos or peer is None or peer.connection is not commands

        with self._joined:
            if not self._joined.wait_for(is_settled, self.handshake_seconds):
                del self._command_connections[rank]
                commands.close()

    def _receive_messages(self, connection: Connection, rank: int) -> None:
        handler = self._handler.result()
        try:
            while True:
                handler(rank, MESSAGES.decode(connection.receive()))
        except (ProtocolError, EOFError, OSError) as error:
            detail = f"its connection to rank 0 ended: {error or 'closed'}"
            connection.close()
            with self._joined:
                self._command_connections.pop(rank).connection.close()
            handler(rank, WorkerDied(detail=detail, time=time.time()))

    def _add_command_connection(self, rank: int, added: _CommandConnection) -> None:
        previous = self._command_connections.get(rank)
        if previous is not None:
            # One thread serves each connection, so an older one may be served later.
            if previous.order > added.order:
                raise ProtocolError(f"a later process of rank {rank} has connected")
            previous.connection.close()  # of a process that died before it joined
        self._command_connections[rank] = added
        self._joined.notify_all()

    def _find_command_connection(self, hello: PeerHello) -> Connection | None:
        """Return the connection for commands of the process that sent `hello`."""
        peer = self._command_connections.get(hello.rank)
        return peer.connection if peer is not None and peer.token == hello.token else None

    def _add_peer(self, hello: PeerHello, opened: bytes) -> None:
        commands = self._find_command_connection(hello)
        if commands is None:
            raise ProtocolError(f"this process of rank {hello.rank} has no connection for commands")
        commands.send(opened)
        self.worker_infos[hello.rank] = hello.info
        self._joined.notify_all()
        if len(self.worker_infos) == self.count:
            self.stop_listening()

    def _admit(
        self, accepted: socket.socket, order: int, opened: bytes
    ) -> tuple[Connection, PeerHello]:
        """Authenticate a process that has connected, and add it to the peers.

        A peer joins with its connection for messages, which is the second one.

        Raises:
            ProtocolError: The process is no peer of this run, or has joined already.
            EOFError: The process closed the connection.
            OSError: The connection is broken, or the process has not joined in time.
        """
        deadline = time.monotonic() + self.handshake_seconds
        connection = authenticate_client(accepted, self._key, deadline)
        hello = HELLO.decode(connection.receive(max_bytes=MAX_HELLO_BYTES, deadline=deadline))
        accepted.settimeout(None)
        with self._joined:
            if hello.direction == "messages":  # another thread adds the connection for commands
                self._joined.wait_for(
                    lambda: self._find_command_connection(hello) is not None,
                    deadline - time.monotonic(),
                )
            if self._closed.is_set():
                raise ProtocolError("the run has all its processes, or has ended")
            if hello.rank in self.worker_infos or not 1 <= hello.rank <= self.count:
                raise ProtocolError(f"rank {hello.rank} has joined already, or is not in the run")
            if hello.direction == "commands":
                added = _CommandConnection(connection, hello.token, order)
                self._add_command_connection(hello.rank, added)
            else:
                self._add_peer(hello, opened)
        return connection, hello


def connect_to_rank_zero(
    store: LauncherStore, key: str, rank: int, info: WorkerInfo
) -> tuple[RankZeroConnection, RunDirectory]:
    """Connect to rank 0 as soon as it has opened the run.

    Args:
        store: Store of the launcher.
        key: Key under which rank 0 publishes its address.
        rank: Rank of this process.
        info: Node and process of this rank.

    Returns:
        The connections, and the directory of the run.

    Raises:
        ControllerError: Rank 0 could not open the run, or has not done so in time.
        ProtocolError: The process at the address is not rank 0.
        EOFError: Rank 0 has closed the connection.
        OSError: Rank 0 cannot be reached.
    """
    try:
        entry = store.get(key)
    except RuntimeError as error:  # of which `DistStoreError` of torch is a subclass
        raise ControllerError(
            f"rank 0 has not opened the run, so rank {rank} cannot join it: {error}. The process "
            "of rank 0 has died, has not called fit(), or its storage is slow. See its output"
        ) from error
    server_address: ServerAddress = json.loads(entry)
    if "error" in server_address:
        raise ControllerError(f"rank 0 cannot open the run: {server_address['error']}")
    with contextlib.ExitStack() as on_error:
        connections = []
        token = secrets.token_hex(16)
        for direction in ("commands", "messages"):
            connection = _open_connection(server_address)
            on_error.callback(connection.close)
            hello = PeerHello(rank=rank, info=info, direction=direction, token=token)
            connection.send(HELLO.encode(hello))
            connections.append(connection)
        commands, messages = connections
        opened = COMMANDS.decode(commands.receive())
        if not isinstance(opened, RunOpened):
            raise ProtocolError(f"expected RunOpened from rank 0, received {opened!r}")
        on_error.pop_all()
    return RankZeroConnection(messages, commands), pickle.loads(opened.directory)


def _open_connection(server_address: ServerAddress) -> Connection:
    deadline = time.monotonic() + CONNECT_SECONDS
    address = server_address["host"], server_address["port"]
    connected = socket.create_connection(address, CONNECT_SECONDS)
    try:
        return authenticate_server(connected, bytes.fromhex(server_address["key"]), deadline)
    except BaseException:
        connected.close()
        raise


def get_peer_address(ranks: Ranks) -> str:
    """Return the address at which the other ranks reach this process."""
    return LOOPBACK if ranks.local_world_size == ranks.world_size else get_node_address()


def _raise_descriptor_limit(required: int) -> None:
    """Raise the number of descriptors that this process may open, up to its hard limit.

    The default of 1,024 is too low for the connections of 512 ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = required if hard == resource.RLIM_INFINITY else min(required, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):  # a system-wide limit is lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def _listen_on_free_port(host: str) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.bind(address)
    listener.listen(BACKLOG)
    return listener
