"""Send random data to the server of a torchrun group.

    python -m benchmarks soak --frames 100000 --seed 7

Each connection sends one piece of data: noise or a wrong proof instead of the handshake, or an
invalid message with the right key. The server must reject it without executing it, and must not
keep threads or descriptors. Meanwhile, messages of a connected peer must arrive.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import pickle
import queue
import random
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._random_messages import describe, draw
from drawbar._modes.connection import PREAMBLE, Connection, authenticate_server
from drawbar._modes.torchrun_messages import HELLO, MESSAGES, PeerHello, PeerMessage
from drawbar._modes.torchrun_server import TorchrunServer, connect_to_rank_zero
from drawbar._process.codec import ProtocolError
from drawbar._process.ranks import WorkerInfo
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._protocol.messages import DiagnosisRequest
from drawbar.train._worker.context import LOOPBACK

TIMEOUT_SECONDS = 60.0
CHECK_EVERY = 100
MAX_GROWTH_BYTES = 32 << 20
NONCE = b"n" * 32
INFO = WorkerInfo(node_id="node", node_ip=LOOPBACK, hostname="host", pid=1)


class _Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


class Store:
    """Store of a launcher with one process."""

    def __init__(self) -> None:
        self._values: queue.SimpleQueue[str] = queue.SimpleQueue()

    def set(self, key: str, value: str) -> None:
        """Store a value."""
        self._values.put(value)

    def get(self, key: str) -> Any:
        """Wait for a value and return it."""
        return self._values.get()


class _Attack:
    """Random connections to one server.

    Args:
        rng: Source of random numbers.
        folder: Directory of the run, and of the file that an unpickled bomb creates.
    """

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self._rng = rng
        self._other_threads = set(threading.enumerate())
        self._marker = folder / "exploded"
        # More ranks than connections, so that the server never stops listening.
        self._server = TorchrunServer(1 << 30, LOOPBACK)
        self._received: queue.SimpleQueue[tuple[int, object]] = queue.SimpleQueue()
        self._server.set_handler(lambda rank, message: self._received.put((rank, message)))
        store = Store()
        self._server.publish_address(store, "run", RunDirectory(folder))
        published = store.get("run")
        self._address = json.loads(published)
        store.set("run", published)
        self._peer, _ = connect_to_rank_zero(store, "run", 1, INFO)
        self._peer_threads = set(threading.enumerate()) - self._other_threads
        self._ranks = itertools.count(2)
        self._kinds: list[Callable[[], None]] = [
            self._send_noise,
            self._send_wrong_proof,
            self._send_invalid_hello,
            self._send_large_frame,
            self._send_invalid_message,
        ]

    def run(self, count: int) -> list[str]:
        """Open `count` connections and return a line for each violation."""
        violations = []
        for number in range(count):
            # Joined peers stay in the list of ranks, so fewer connections join.
            kind = self._rng.choice(self._kinds if number % 10 == 0 else self._kinds[:-1])
            kind()
            if number % CHECK_EVERY == 0 and not self._is_peer_alive(number):
                violations.append(f"connection {number}: the peer's message did not arrive")
        if self._marker.exists():
            violations.append("received data was unpickled")
        return violations

    def join_rejected(self) -> None:
        """Wait until the threads of rejected connections have ended."""
        for thread in set(threading.enumerate()) - self._other_threads - self._peer_threads:
            thread.join(TIMEOUT_SECONDS)

    def close(self) -> None:
        """Close the peer and the server, and wait for its threads."""
        self._peer.close()
        self._server.stop_listening()
        for thread in set(threading.enumerate()) - self._other_threads:
            thread.join(TIMEOUT_SECONDS)

    def _is_peer_alive(self, number: int) -> bool:
        self._peer.send(DiagnosisRequest(request_id=number))
        with contextlib.suppress(queue.Empty):
            while True:
                if self._received.get(timeout=TIMEOUT_SECONDS) == (
                    1,
                    DiagnosisRequest(request_id=number),
                ):
                    return True
        return False

    def _connect(self) -> socket.socket:
        address = self._address["host"], self._address["port"]
        connected = socket.create_connection(address, TIMEOUT_SECONDS)
        # Reset on close, so that closed connections do not use up the ports.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return connected

    def _authenticate(self, connected: socket.socket) -> Connection:
        key = bytes.fromhex(self._address["key"])
        return authenticate_server(connected, key, time.monotonic() + TIMEOUT_SECONDS)

    def _draw_noise(self) -> bytes:
        bomb = pickle.dumps(_Bomb(self._marker))
        choices = [
            self._rng.randbytes(self._rng.randint(0, 200)),
            bomb,
            struct.pack("!I", len(bomb)) + bomb,
            b"GET / HTTP/1.1\r\n\r\n",
            PREAMBLE + NONCE,
            b"",
        ]
        return self._rng.choice(choices)

    def _draw_invalid(self, valid: bytes) -> bytes:
        """Return a frame that usually is no valid message."""
        changed = bytearray(valid)
        for _ in range(self._rng.randint(1, 4)):
            changed[self._rng.randrange(len(changed))] = self._rng.randrange(256)
        cut = valid[: self._rng.randrange(len(valid))]
        return self._rng.choice([bytes(changed), cut, valid + b"\x00", self._draw_noise()])

    def _wait_for_close(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_WR)
            while connected.recv(1 << 16):
                pass

    def _send_noise(self) -> None:
        with self._connect() as connected:
            with contextlib.suppress(OSError):
                connected.sendall(self._draw_noise())
            self._wait_for_close(connected)

    def _send_wrong_proof(self) -> None:
        with self._connect() as connected:
            nonce = connected.recv(len(PREAMBLE) + len(NONCE))[len(PREAMBLE) :]
            proof = hashlib.sha256(nonce + NONCE).digest()
            connected.sendall((NONCE + proof)[: self._rng.randint(0, 64)])
            self._wait_for_close(connected)

    def _send_invalid_hello(self) -> None:
        with self._connect() as connected:
            hello = PeerHello(rank=-next(self._ranks), info=INFO, direction="commands", token="")
            self._authenticate(connected).send(self._draw_invalid(HELLO.encode(hello)))
            self._wait_for_close(connected)

    def _send_large_frame(self) -> None:
        with self._connect() as connected:
            self._authenticate(connected)
            size = self._rng.randint(1 << 20, 2**32 - 1)
            connected.sendall(struct.pack("!I", size) + self._draw_noise())
            self._wait_for_close(connected)

    def _send_invalid_message(self) -> None:
        rank = next(self._ranks)
        with self._connect() as connected, self._connect() as connected_for_commands:
            commands = self._authenticate(connected_for_commands)
            messages = self._authenticate(connected)
            commands.send(
                HELLO.encode(PeerHello(rank=rank, info=INFO, direction="commands", token=""))
            )
            messages.send(
                HELLO.encode(PeerHello(rank=rank, info=INFO, direction="messages", token=""))
            )
            commands.receive()
            message = MESSAGES.encode(draw(self._rng, PeerMessage))
            messages.send(self._draw_invalid(message))
            self._wait_for_close(connected)


def check_frames(count: int, seed: int) -> list[str]:
    """Send random data on `count` connections, and decode `count` random frames.

    Returns:
        A line for each violation.
    """
    rng = random.Random(f"frames/{seed}")
    with tempfile.TemporaryDirectory(prefix="drawbar-frames-") as folder:
        attack = _Attack(rng, Path(folder))
        violations = attack.run(min(count, CHECK_EVERY))  # caches are filled afterwards
        attack.join_rejected()
        before = _Resources()
        violations += attack.run(count)
        attack.join_rejected()
        violations += before.describe_growth()
        attack.close()
    return violations + check_decoding(count, rng)


def check_decoding(count: int, rng: random.Random) -> list[str]:
    """Decode random messages, which must be unchanged, and changed ones, which must not crash."""
    violations = []
    for _ in range(count):
        message = draw(rng, PeerMessage)
        data = MESSAGES.encode(message)
        if describe(MESSAGES.decode(data)) != describe(message):
            violations.append(f"not decoded to itself: {message!a}")
        changed = bytearray(data)
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        with contextlib.suppress(ProtocolError):
            MESSAGES.decode(changed)
    return violations


class _Resources:
    """Threads, descriptors, and memory of this process."""

    def __init__(self) -> None:
        self._threads = threading.active_count()
        self._descriptors = len(os.listdir("/proc/self/fd"))
        self._memory = _read_memory()

    def describe_growth(self) -> list[str]:
        """Return a line for each resource of which this process uses more than before."""
        now = _Resources()
        lines = []
        if now._threads > self._threads:
            lines.append(f"{now._threads - self._threads} threads were not ended")
        if now._descriptors > self._descriptors:
            lines.append(f"{now._descriptors - self._descriptors} descriptors were not closed")
        growth = now._memory - self._memory
        if growth > MAX_GROWTH_BYTES:
            lines.append(f"memory grew by {growth / 1e6:.0f} MB")
        return lines


def _read_memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
