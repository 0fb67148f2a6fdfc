"""Connections between rank 0 and the other processes of a torchrun group."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # public, not in its __all__

from benchmarks._soak_frames import Store, check_frames
from drawbar._modes.connection import (
    PREAMBLE,
    AuthenticationError,
    Connection,
    authenticate_client,
    authenticate_server,
)
from drawbar._modes.torchrun_messages import HELLO, PeerHello
from drawbar._modes.torchrun_server import (
    MAX_HANDSHAKES,
    MAX_HELLO_BYTES,
    RankZeroConnection,
    TorchrunServer,
    connect_to_rank_zero,
)
from drawbar._process.codec import ProtocolError
from drawbar._process.errors import ControllerError
from drawbar._process.ranks import WorkerInfo
from drawbar._process.serialization import Serialized
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._protocol.commands import FileChunkAck
from drawbar.train._protocol.messages import CollectiveCalled, RankFinished, WorkerDied
from drawbar.train._worker.context import LOOPBACK
from tests.train.conftest import lowest_free_file_descriptor, no_free_file_descriptor
from tests.train.test_unpickling_safety import Bomb

LOCAL_INFO = WorkerInfo(node_id="0@here", node_ip=LOOPBACK, hostname="here", pid=1, gpu_ids=())
HELLO_OF_RANK_1 = PeerHello(rank=1, info=LOCAL_INFO, direction="commands", token="first")
COLLECTIVE = CollectiveCalled(sequence=0, number=0, kind="barrier", payload=None, location="")
PATIENCE_S = 30.0


class Run:
    """A server of a run, and connections to it, which are closed at the end of a test."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.server = self.start()

    def start(self, count: int = 1, handshake_seconds: float = 60.0) -> TorchrunServer:
        """Start another server."""
        self.server = TorchrunServer(count, LOOPBACK, handshake_seconds)
        store = Store()
        self.server.publish_address(store, "run", RunDirectory(self._folder))
        self._stack.callback(self.server.stop_listening)
        self._address = json.loads(store.get("run"))
        return self.server

    @property
    def address(self) -> str:
        """Entry of the server in the store."""
        return json.dumps(self._address)

    def join(self) -> RankZeroConnection:
        """Connect one peer to the run."""
        store = Store()
        store.set("run", self.address)
        connection, _ = connect_to_rank_zero(store, "run", 1, LOCAL_INFO)
        assert self.server.wait_for_peers(0) == 1
        self._stack.callback(connection.close)
        return connection

    def open_socket(self) -> socket.socket:
        address = self._address["host"], self._address["port"]
        return self._stack.enter_context(socket.create_connection(address, PATIENCE_S))

    def authenticate(self, key: bytes | None = None) -> Connection:
        """Connect with a key, but send no `PeerHello`."""
        key = bytes.fromhex(self._address["key"]) if key is None else key
        return authenticate_server(self.open_socket(), key, time.monotonic() + PATIENCE_S)

    def collect_messages(self) -> queue.SimpleQueue[tuple[int, Any]]:
        received: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.server.set_handler(lambda rank, message: received.put((rank, message)))
        return received


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.ExitStack() as stack:
        yield Run(tmp_path, stack)


def check_is_closed(connection: Connection) -> None:
    """Check that the server has closed a connection."""
    with pytest.raises((EOFError, ConnectionError)):
        connection.receive(deadline=time.monotonic() + PATIENCE_S)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server((LOOPBACK, 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        with client, server:
            yield client, server


def test_torchrun_server_buffers_messages_until_handler_is_set(run: Run) -> None:
    connection = run.join()
    connection.send(COLLECTIVE)
    received = run.collect_messages()
    assert received.get(timeout=PATIENCE_S) == (1, COLLECTIVE)
    connection.close()
    rank, message = received.get(timeout=PATIENCE_S)
    assert (rank, type(message)) == (1, WorkerDied)


def test_torchrun_server_wrong_key_is_rejected_and_right_key_joins(run: Run) -> None:
    with pytest.raises((EOFError, ConnectionError)):
        run.authenticate(b"wrong")
    run.join()


def test_torchrun_server_silent_connections_do_not_delay_peers(run: Run) -> None:
    for _ in range(MAX_HANDSHAKES // 2):
        run.open_socket()
    begin = time.monotonic()
    run.join()
    assert time.monotonic() - begin < run.server.handshake_seconds / 2


def test_torchrun_server_incomplete_handshake_is_closed_after_deadline(run: Run) -> None:
    run.start(handshake_seconds=0.2)
    silent, incomplete = run.open_socket(), run.open_socket()
    incomplete.send(b"x" * 10)
    for connected in (silent, incomplete):
        with connected.makefile("rb") as stream:
            # Reads until the server closes the connection.
            assert stream.read().startswith(PREAMBLE)


def test_torchrun_server_too_many_silent_connections_are_closed_for_peer(run: Run) -> None:
    run.start(handshake_seconds=0.2)
    for _ in range(2 * MAX_HANDSHAKES):
        run.open_socket()
    run.join()


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_torchrun_server_rank_outside_group_is_rejected(run: Run, rank: int) -> None:
    connection = run.authenticate()
    connection.send(HELLO.encode(structs.replace(HELLO_OF_RANK_1, rank=rank)))
    check_is_closed(connection)


def test_torchrun_server_second_process_of_same_rank_is_rejected(run: Run) -> None:
    run.start(count=2)
    first, second = run.join(), run.authenticate()
    second.send(HELLO.encode(HELLO_OF_RANK_1))
    check_is_closed(second)
    first.send(COLLECTIVE)
    assert run.collect_messages().get(timeout=PATIENCE_S) == (1, COLLECTIVE)


def test_torchrun_server_messages_without_connection_for_commands_are_rejected(run: Run) -> None:
    run.start(handshake_seconds=0.2)
    connection = run.authenticate()
    connection.send(HELLO.encode(structs.replace(HELLO_OF_RANK_1, direction="messages")))
    check_is_closed(connection)


def test_torchrun_server_commands_without_connection_for_messages_are_closed(run: Run) -> None:
    run.start(handshake_seconds=0.2)
    connection = run.authenticate()
    connection.send(HELLO.encode(HELLO_OF_RANK_1))
    check_is_closed(connection)


def test_torchrun_server_peer_that_died_before_it_joined_is_replaced(run: Run) -> None:
    first = run.authenticate()
    first.send(HELLO.encode(HELLO_OF_RANK_1))
    connection = run.join()
    check_is_closed(first)
    connection.send(COLLECTIVE)
    assert run.collect_messages().get(timeout=PATIENCE_S) == (1, COLLECTIVE)


def test_torchrun_server_older_process_does_not_replace_newer_one_that_joins(run: Run) -> None:
    older, newer = run.open_socket(), run.authenticate()  # accepted in this order
    newer.send(HELLO.encode(HELLO_OF_RANK_1))
    key = bytes.fromhex(json.loads(run.address)["key"])
    late = authenticate_server(older, key, time.monotonic() + PATIENCE_S)
    late.send(HELLO.encode(structs.replace(HELLO_OF_RANK_1, token="older")))
    # The server closes one of them, whichever hello it reads first: always the older one.
    check_is_closed(late)
    messages = run.authenticate()
    messages.send(HELLO.encode(structs.replace(HELLO_OF_RANK_1, direction="messages")))
    assert newer.receive(deadline=time.monotonic() + PATIENCE_S)


REPORTING_PEER = """
import os, sys
from drawbar.train._protocol.messages import Report
from tests.train.worker_group.test_torchrun_server import LOCAL_INFO, Store, connect_to_rank_zero
store = Store()
store.set("run", sys.argv[1])
connection, _ = connect_to_rank_zero(store, "run", 1, LOCAL_INFO)
for index in range(int(sys.argv[2])):
    connection.send(Report(index=index, metrics={"value": "x" * 10_000}, time=0.0, location=""))
print("reported", flush=True)
sys.stdin.readline()
if sys.argv[3] == "exit":
    sys.exit()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", [pytest.param("exit", marks=pytest.mark.nightly), "kill"])
def test_torchrun_server_process_ends_after_report_loses_nothing(run: Run, end: str) -> None:
    num_reports = 100  # more than the system of rank 0 accepts before rank 0 reads
    peer = subprocess.Popen(
        [sys.executable, "-c", REPORTING_PEER, run.address, str(num_reports), end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert peer.stdout is not None
    assert peer.stdout.readline() == b"reported\n"
    # The peer does not read this command. With unread data, the system resets a TCP connection.
    run.server.send([1], FileChunkAck(request_id=0))
    peer.communicate(b"\n", timeout=PATIENCE_S)
    received = run.collect_messages()
    messages = [received.get(timeout=PATIENCE_S)[1] for _ in range(num_reports + 1)]
    assert [message.index for message in messages[:-1]] == list(range(num_reports))
    assert isinstance(messages[-1], WorkerDied)


def test_torchrun_server_large_hello_is_rejected(run: Run) -> None:
    connection = run.authenticate()
    connection.send(b"x" * (MAX_HELLO_BYTES + 1))
    check_is_closed(connection)


def test_torchrun_server_pickle_bomb_is_rejected_and_not_executed(run: Run, tmp_path: Path) -> None:
    marker = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(marker))
    stranger, commands, messages = (run.authenticate() for _ in range(3))
    stranger.send(bomb)
    check_is_closed(stranger)
    commands.send(HELLO.encode(HELLO_OF_RANK_1))
    messages.send(HELLO.encode(structs.replace(HELLO_OF_RANK_1, direction="messages")))
    commands.receive()
    messages.send(bomb)
    _, message = run.collect_messages().get(timeout=PATIENCE_S)
    assert "no valid message" in message.detail
    assert not marker.exists()


def test_torchrun_server_return_value_is_not_unpickled(run: Run, tmp_path: Path) -> None:
    marker = tmp_path / "exploded"
    value = Serialized(pickle.dumps(Bomb(marker)))
    run.join().send(RankFinished(time=1.0, return_value=value))
    _, message = run.collect_messages().get(timeout=PATIENCE_S)
    assert message.return_value.to_parts() == value.to_parts()
    assert not marker.exists()


@pytest.mark.nightly
def test_torchrun_server_random_frames_do_not_affect_peers() -> None:
    assert check_frames(2000, seed=7) == []


def test_connection_keys_differ_both_sides_reject(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    client, server = sockets
    deadline = time.monotonic() + PATIENCE_S
    errors: list[Exception] = []

    def connect() -> None:
        try:
            authenticate_server(client, b"other", deadline)
        except (AuthenticationError, EOFError, ConnectionError) as error:
            errors.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    with pytest.raises(AuthenticationError):
        authenticate_client(server, b"key", deadline)
    server.close()
    thread.join(PATIENCE_S)
    assert errors


def test_connection_server_without_key_is_rejected(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    client, server = sockets
    server.sendall(PREAMBLE + b"n" * 32 + b"p" * 32)
    with pytest.raises(AuthenticationError, match="address of rank 0"):
        authenticate_server(client, b"key", time.monotonic() + PATIENCE_S)


def test_connection_reflected_proof_is_rejected(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    client, server = sockets
    server.sendall(PREAMBLE + b"n" * 32)
    reflect = threading.Thread(target=lambda: server.sendall(server.recv(64)[32:]))
    reflect.start()
    with pytest.raises(AuthenticationError):
        authenticate_server(client, b"key", time.monotonic() + PATIENCE_S)
    reflect.join(PATIENCE_S)


def test_connection_frame_above_limit_is_rejected(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    client, server = sockets
    client.sendall(struct.pack("!I", 2**32 - 1))
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        Connection(server).receive()


FORKING_PEER = """
import os, socket, sys
from drawbar._modes.connection import Connection
connection = Connection(socket.socket(fileno=int(sys.argv[1])))
connection.send(b"report")
if os.fork() == 0:
    sys.stdin.read()
os._exit(0)
"""


def test_connection_process_dies_with_live_fork_loses_nothing_and_ends(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    client, server = sockets
    peer = subprocess.Popen(
        [sys.executable, "-c", FORKING_PEER, str(client.fileno())],
        pass_fds=[client.fileno()],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    client.close()
    connection = Connection(server)
    deadline = time.monotonic() + PATIENCE_S
    assert connection.receive(deadline=deadline) == b"report"
    with pytest.raises(EOFError):
        connection.receive(deadline=deadline)
    peer.communicate(timeout=PATIENCE_S)


def test_torchrun_server_accepts_again_after_file_descriptors_ran_out(tmp_path: Path) -> None:
    server, store = TorchrunServer(1, LOOPBACK), Store()
    with socket.socket() as scanner:
        lowest = lowest_free_file_descriptor()
        server.publish_address(store, "run", RunDirectory(tmp_path))
        address = json.loads(store.get("run"))
        with no_free_file_descriptor(lowest) as wait_until_accept_failed:
            scanner.connect((address["host"], address["port"]))
            scanner.shutdown(socket.SHUT_RDWR)
            wait_until_accept_failed()
    store.set("run", json.dumps(address))
    connection, _ = connect_to_rank_zero(store, "run", 1, LOCAL_INFO)
    assert server.wait_for_peers(PATIENCE_S) == 1
    connection.close()


def test_torchrun_server_of_many_ranks_raises_limit_of_descriptors() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        TorchrunServer(300, LOOPBACK).stop_listening()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 600
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_torchrun_server_random_kills_lose_no_message(pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "benchmarks._rank_kills", "--kills=20", "--seed=7"]
    ended = subprocess.run(
        command,
        cwd=pytestconfig.rootpath,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout


def test_torchrun_server_names_ranks_that_do_not_join_in_time() -> None:
    server = TorchrunServer(3, LOOPBACK, join_seconds=0)
    try:
        server.worker_infos[2] = LOCAL_INFO
        with pytest.raises(ControllerError, match=r"within 0 s: ranks 1, 3 \(2\) did not"):
            server.wait_for_peers(0)
        server.worker_infos.update({1: LOCAL_INFO, 3: LOCAL_INFO})
        assert server.wait_for_peers(0) == 3
    finally:
        server.stop_listening()


def test_rank_of_torchrun_names_rank_zero_if_it_does_not_open_the_run() -> None:
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    rank_store = PrefixStore("drawbar", store)
    with pytest.raises(ControllerError, match="rank 0 has not opened the run, so rank 1 cannot"):
        connect_to_rank_zero(rank_store, "run", 1, LOCAL_INFO)
