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
from drawbar.train._worker_group.peers import Hello, Lost, Peers, Said, Wire, meet_rank_zero
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


def connect(peers: Peers, folder: Path) -> Wire:
    """Connect one peer to a run."""
    store = Store()
    peers.invite(store, "run", RunDirectory(folder))
    wire, _ = meet_rank_zero(store, "run", Hello(1, LOCAL_INFO))
    assert peers.wait(30) == 1
    return wire


def test_peer_messages_before_handler_are_buffered(tmp_path: Path) -> None:
    peers = Peers(1, LOOPBACK)
    wire = connect(peers, tmp_path)
    wire.send(Said(COLLECTIVE))
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    peers.hear(lambda rank, message: received.put((rank, message)))
    assert received.get(timeout=30) == (1, Said(COLLECTIVE))
    wire.close()
    rank, message = received.get(timeout=30)
    assert (rank, type(message)) == (1, Lost)


def test_peers_accept_again_after_file_descriptors_ran_out(tmp_path: Path) -> None:
    peers, store = Peers(1, LOOPBACK), Store()
    with socket.socket() as scanner:
        lowest = lowest_free_file_descriptor()
        peers.invite(store, "run", RunDirectory(tmp_path))
        address = json.loads(store.get("run"))
        with no_free_file_descriptor(lowest) as wait_until_accept_failed:
            scanner.connect((address["host"], address["port"]))
            scanner.shutdown(socket.SHUT_RDWR)
            wait_until_accept_failed()
    store.set("run", json.dumps(address))
    wire, _ = meet_rank_zero(store, "run", Hello(1, LOCAL_INFO))
    assert peers.wait(30) == 1
    wire.close()
