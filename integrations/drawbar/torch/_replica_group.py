"""Group of ranks whose collectives another thread can end, and which a death does not destroy.

gloo has no way to end a collective: `abort()` and `shutdown()` from another thread wake no thread,
and only the neighbours of a dead rank get an error. Shutting down the sockets of the group ends all
its collectives with an error at once. The sockets are those that were opened while the group
connected, and whose two addresses another member has opened in the opposite direction.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, not in its __all__
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
    Work,
)

CONNECT_TIMEOUT = timedelta(seconds=20)
"""Time limit for connecting. All members call `connect` at the same time."""

CHUNK_BYTES = 64 * 1024 * 1024
"""Size of one message. Each of them has the time limit `CONNECT_TIMEOUT`."""


@dataclass
class CollectiveTimeout:
    """Time limit of the collectives of an attempt, which `process_group` sets."""

    value: timedelta = timedelta(minutes=30)


def open_store(host: str) -> TCPStore:
    """Open a store on a free port of this node, for the members of a group.

    Args:
        host: Address of this node, at which other nodes reach it.
    """
    timeout = CONNECT_TIMEOUT
    return TCPStore(host, 0, None, is_master=True, timeout=timeout, wait_for_workers=False)


class ReplicaGroup:
    """Connected group of all ranks.

    Args:
        address: Address of the store, as "host:port".
        name: Name of the group in the store.
        rank: Rank of this process.
        size: Number of ranks.
        timeout: Time limit of a collective.

    Raises:
        RuntimeError: The members did not connect.
    """

    def __init__(self, address: str, name: str, rank: int, size: int, timeout: timedelta) -> None:
        host, _, port = address.rpartition(":")
        self.rank, self.size = rank, size
        # Keep the store: the group reads from it for as long as it exists.
        client = TCPStore(host, int(port), None, is_master=False, timeout=CONNECT_TIMEOUT)
        self._store = PrefixStore(name, client)
        before = set(_list_sockets())
        self._gloo: Any = ProcessGroupGloo(self._store, rank, size, CONNECT_TIMEOUT)
        opened = [number for number in _list_sockets() if number not in before]
        self._sockets = self._find_members_sockets(opened)
        self._timeout = timeout
        self._is_shut_down = False

    def _find_members_sockets(self, opened: Sequence[tuple[int, int]]) -> list[socket.socket]:
        """Return duplicates of the sockets that are connected to another member."""
        own: list[tuple[socket.socket, list[Any]]] = []
        for number, _ in opened:
            with contextlib.suppress(OSError):
                duplicate = socket.socket(fileno=os.dup(number))
                try:
                    ends = [list(duplicate.getsockname()[:2]), list(duplicate.getpeername()[:2])]
                except OSError:  # it listens, or is not connected
                    duplicate.close()
                    continue
                own.append((duplicate, ends))
        self._store.set(f"sockets_{self.rank}", json.dumps([ends for _, ends in own]))
        others: list[object] = []
        for rank in range(self.size):
            if rank != self.rank:
                others += json.loads(self._store.get(f"sockets_{rank}"))
        for duplicate, ends in own:
            if ends[::-1] not in others:
                duplicate.close()
        return [duplicate for duplicate, ends in own if ends[::-1] in others]

    @property
    def is_complete(self) -> bool:
        """True if the socket to each other member is known."""
        return len(self._sockets) == self.size - 1

    def shut_down(self) -> None:
        """End all collectives, here and on the other members, with an error. Thread-safe."""
        self._is_shut_down = True
        for connection in self._sockets:
            with contextlib.suppress(OSError):  # the other side was first
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the sockets of the group."""
        self.shut_down()
        for connection in self._sockets:
            connection.close()

    def start_sum(self, tensor: torch.Tensor) -> Work:
        """Start to replace a tensor by its sum over all ranks."""
        self._check()
        work: Work = self._gloo.allreduce([tensor], self._make_options(dist.ReduceOp.SUM))
        return work

    def get_maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the maximum of a tensor over all ranks."""
        self._check()
        self._gloo.allreduce([tensor], self._make_options(dist.ReduceOp.MAX)).wait()
        return tensor

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks, by rank."""
        self._check()
        own = torch.tensor(values, dtype=torch.int64)
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        self._gloo.allgather([gathered], [own]).wait()
        return [tensor.tolist() for tensor in gathered]

    def broadcast(self, tensors: Iterable[torch.Tensor], source: int) -> None:
        """Copy tensors of one rank to all."""
        self._check()
        options: Any = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        options.timeout = self._timeout
        works: list[Work] = []
        try:
            for tensor in tensors:
                works.append(self._gloo.broadcast([tensor], options))
            for work in works:
                work.wait()
        except RuntimeError:
            self.shut_down()  # no collective may write to the tensors later
            for work in works:
                with contextlib.suppress(RuntimeError):
                    work.wait()
            raise

    def send(self, data: bytes, rank: int) -> None:
        """Send bytes to another rank."""
        self._check()
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._gloo.send([torch.tensor([len(data)])], rank, 0).wait()
        for chunk in torch.split(payload, CHUNK_BYTES):
            self._gloo.send([chunk], rank, 1).wait()

    def receive(self, rank: int) -> bytes:
        """Receive bytes from another rank."""
        self._check()
        size = torch.zeros(1, dtype=torch.int64)
        self._gloo.recv([size], rank, 0).wait()
        payload = torch.empty(int(size), dtype=torch.uint8)
        for chunk in torch.split(payload, CHUNK_BYTES):
            self._gloo.recv([chunk], rank, 1).wait()
        return payload.numpy().tobytes()

    def _make_options(self, operation: object) -> object:
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        options.timeout = self._timeout
        return options

    def _check(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("A rank of the group has died.")


def _list_sockets() -> Iterator[tuple[int, int]]:
    """Yield the number and the inode of each open socket of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                yield int(name), int(target[8:-1])
