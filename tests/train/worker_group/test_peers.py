"""How the processes of a launcher's group find rank 0's, and what each hears of the other."""

from __future__ import annotations

import json
import queue
import socket
from pathlib import Path
from typing import Any

from drawbar.train._messages import CollectiveCalled, WorkerInfo
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._worker.addresses import LOOPBACK
from drawbar.train._worker_group.peers import Hello, Lost, Peers, Said, Wire, meet_rank_zero
from tests.train.conftest import lowest_free_file_descriptor, no_free_file_descriptor

HERE = WorkerInfo(node_id="0@here", node_ip=LOOPBACK, hostname="here", pid=1, gpu_ids=())
MEETS = CollectiveCalled(sequence=0, number=0, kind="barrier", payload=None, where="")


class Store:
    """A launcher's store, of one process."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def set(self, key: str, value: str) -> None:
        self._said.put(value)

    def get(self, key: str) -> Any:
        return self._said.get()


def come(peers: Peers, folder: Path) -> Wire:
    """One peer comes to a run."""
    store = Store()
    peers.invite(store, "run", RunDirectory(folder))
    wire, _ = meet_rank_zero(store, "run", Hello(1, HERE))
    assert peers.wait(30) == 1
    return wire


def test_what_a_peer_says_before_anybody_listens_is_kept(tmp_path: Path) -> None:
    peers = Peers(1, LOOPBACK)
    wire = come(peers, tmp_path)
    wire.send(Said(MEETS))
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    peers.hear(lambda rank, said: heard.put((rank, said)))
    assert heard.get(timeout=30) == (1, Said(MEETS))
    wire.close()
    rank, said = heard.get(timeout=30)
    assert (rank, type(said)) == (1, Lost)


def test_peers_accept_again_after_file_descriptors_ran_out(tmp_path: Path) -> None:
    peers, store = Peers(1, LOOPBACK), Store()
    with socket.socket() as scanner:
        lowest = lowest_free_file_descriptor()
        peers.invite(store, "run", RunDirectory(tmp_path))
        invitation = json.loads(store.get("run"))
        with no_free_file_descriptor(lowest) as wait_until_accept_failed:
            scanner.connect((invitation["host"], invitation["port"]))
            scanner.shutdown(socket.SHUT_RDWR)
            wait_until_accept_failed()
    store.set("run", json.dumps(invitation))
    wire, _ = meet_rank_zero(store, "run", Hello(1, HERE))
    assert peers.wait(30) == 1
    wire.close()
