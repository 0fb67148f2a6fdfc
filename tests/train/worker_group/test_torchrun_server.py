"""Connections between rank 0 and the other processes of a torchrun group."""

from __future__ import annotations

import json
import queue
import socket
from pathlib import Path
from typing import Any

from drawbar.train._protocol.assignment import WorkerInfo
from drawbar.train._protocol.messages import CollectiveCalled
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._worker.addresses import LOOPBACK
from drawbar.train._worker_group.torchrun_server import (
    MessageSent,
    PeerConnection,
    PeerHello,
    PeerLost,
    TorchrunServer,
    connect_to_rank_zero,
)
from tests.train.conftest import lowest_free_file_descriptor, no_free_file_descriptor

LOCAL_INFO = WorkerInfo(node_id="0@here", node_ip=LOOPBACK, hostname="here", pid=1, gpu_ids=())
COLLECTIVE = CollectiveCalled(sequence=0, number=0, kind="barrier", payload=None, location="")


class Store:
    """Store of a launcher with one process."""

    def __init__(self) -> None:
        self._values: queue.SimpleQueue[str] = queue.SimpleQueue()

    def set(self, key: str, value: str) -> None:
        self._values.put(value)

    def get(self, key: str) -> Any:
        return self._values.get()


def connect(server: TorchrunServer, folder: Path) -> PeerConnection:
    """Connect one peer to a run."""
    store = Store()
    server.publish_address(store, "run", RunDirectory(folder))
    connection, _ = connect_to_rank_zero(store, "run", PeerHello(1, LOCAL_INFO))
    assert server.wait_for_peers(30) == 1
    return connection


def test_torchrun_server_buffers_messages_until_handler_is_set(tmp_path: Path) -> None:
    server = TorchrunServer(1, LOOPBACK)
    connection = connect(server, tmp_path)
    connection.send(MessageSent(COLLECTIVE))
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    server.set_handler(lambda rank, message: received.put((rank, message)))
    assert received.get(timeout=30) == (1, MessageSent(COLLECTIVE))
    connection.close()
    rank, message = received.get(timeout=30)
    assert (rank, type(message)) == (1, PeerLost)


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
    connection, _ = connect_to_rank_zero(store, "run", PeerHello(1, LOCAL_INFO))
    assert server.wait_for_peers(30) == 1
    connection.close()
