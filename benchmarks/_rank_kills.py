"""Kill processes of a torchrun group at random times, and check that no message is lost.

    python -m benchmarks._rank_kills --kills 500 --seed 7

Each process sends reports as fast as it can, and counts those whose `send` has returned. Rank 0
sends commands all the time, which some of the processes never read. After each SIGKILL, rank 0 must
receive all counted reports in their order, and then the death of the process.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import secrets
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks._soak_frames import INFO, Store
from drawbar._modes.torchrun_server import TorchrunServer, connect_to_rank_zero
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._protocol.commands import FileChunkAck
from drawbar.train._protocol.messages import Report, WorkerDied
from drawbar.train._worker.context import LOOPBACK

PEERS = 4
ADDRESS_BYTES = 1024  # below PIPE_BUF, so that each process reads one address
MAX_METRIC_BYTES = 5000
LONGEST_RUN_S = 0.1
TIMEOUT_S = 60.0
_COUNT = struct.Struct("!Q")


class _ReceivedReports:
    """Reports that rank 0 has received, by rank."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(range(1, PEERS + 1), 0)
        self.violations: list[str] = []
        self._dead: set[int] = set()
        self._changed = threading.Condition()

    def add(self, rank: int, message: object) -> None:
        """Handle a message of a rank."""
        with self._changed:
            if isinstance(message, WorkerDied):
                self._dead.add(rank)
                self._changed.notify_all()
                return
            index = message.index if isinstance(message, Report) else -1
            if rank in self._dead or index != self.counts[rank]:
                self.violations.append(f"rank {rank}: {message!r} after {self.counts[rank]}")
            self.counts[rank] += 1

    def wait_for_death(self, rank: int) -> bool:
        """Wait until a rank has died, and return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: rank in self._dead, TIMEOUT_S)


def _send_reports(rank: int, address_pipe: int, sent: mmap.mmap, *, is_reading: bool) -> NoReturn:
    """Send reports until this process is killed."""
    store = Store()
    store.set("run", os.read(address_pipe, ADDRESS_BYTES).decode())
    connection, _ = connect_to_rank_zero(store, "run", rank, INFO)
    if is_reading:
        threading.Thread(target=_read_commands, args=(connection,), daemon=True).start()
    rng, index = random.Random(rank), 0
    while True:
        metrics: dict[str, object] = {"text": "x" * rng.randrange(MAX_METRIC_BYTES)}
        connection.send(Report(index=index, metrics=metrics, time=0.0, location=""))
        index += 1
        # Not by `pack_into`, which writes zeros first: a process may be killed in between.
        sent[rank * _COUNT.size : (rank + 1) * _COUNT.size] = _COUNT.pack(index)


def _read_commands(connection: Any) -> None:
    while True:
        connection.receive()


def _kill_group(rng: random.Random, folder: Path) -> list[str]:
    """Start a group, kill its processes one after the other, and return the violations."""
    server, received = TorchrunServer(PEERS, LOOPBACK), _ReceivedReports()
    sent = mmap.mmap(-1, (PEERS + 1) * _COUNT.size)
    readable, writable = os.pipe()
    pids: dict[int, int] = {}
    for rank in range(1, PEERS + 1):  # forked before the server has threads
        is_reading = rng.random() < 0.5
        pid = os.fork()
        if pid == 0:
            try:
                _send_reports(rank, readable, sent, is_reading=is_reading)
            finally:
                os._exit(1)
        pids[rank] = pid
    store = Store()
    server.publish_address(store, "run", RunDirectory(folder))
    address = json.dumps(json.loads(store.get("run"))).encode()
    for _ in pids:
        os.write(writable, address.ljust(ADDRESS_BYTES))
    violations = []
    if server.wait_for_peers(TIMEOUT_S) < PEERS:
        violations.append("a process did not connect")
    server.set_handler(received.add)
    for rank in rng.sample(list(pids), PEERS):
        server.send(pids, FileChunkAck(request_id=0))
        time.sleep(rng.uniform(0, LONGEST_RUN_S))
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
        count = _COUNT.unpack_from(sent, rank * _COUNT.size)[0]
        if not received.wait_for_death(rank):
            violations.append(f"rank {rank}: its death was not detected")
        # The process may have been killed after a report was sent, and before it was counted.
        if received.counts[rank] not in (count, count + 1):
            violations.append(f"rank {rank}: {received.counts[rank]} of {count} reports received")
    for descriptor in (readable, writable):
        os.close(descriptor)
    for thread in threading.enumerate():
        if thread.name in ("drawbar-peer", "drawbar-peers"):
            thread.join(TIMEOUT_S)
    return violations + received.violations


def kill_ranks(count: int, seed: int) -> list[str]:
    """Kill at least `count` processes and return a line for each violation."""
    rng = random.Random(f"rank kills/{seed}")
    violations: list[str] = []
    with tempfile.TemporaryDirectory(prefix="drawbar-kills-") as folder:
        for _ in range(-(-count // PEERS)):
            violations += _kill_group(rng, Path(folder))
    return violations


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill processes, print the violations, and return the exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    options = parser.parse_args(arguments)
    start = time.monotonic()
    violations = kill_ranks(options.kills, options.seed)
    print(*violations, sep="\n", end="\n" if violations else "")
    seconds = time.monotonic() - start
    print(
        f"{options.kills} kills, seed {options.seed}: {len(violations)} violations, {seconds:.0f} s"
    )
    return bool(violations)


if __name__ == "__main__":
    raise SystemExit(main())
