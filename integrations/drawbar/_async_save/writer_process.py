"""Process that writes files from shared memory to a directory, and keeps them for a restart.

It executes this file in a bare interpreter (`-I -S -E`), so that it starts in about 10 ms and uses
9 MB. For this reason, the file imports only a few modules of the standard library. It has one
thread, and inherits neither locks nor devices of the rank.

It keeps the descriptors of the last two checkpoints: the one that it writes, and the one before.
Processes of the same user can request the complete ones (see `memory_copies.py`). It ends when the
rank ends the connection. If the rank is killed, it ends at the first of these events:

- the node's raylet ends, or the process that controls the run, if it is on this node
- a new process of the rank saves a checkpoint, and sends "release"
- the last process that has requested a checkpoint ends its connection
- no process has a connection for `KEEP_S`
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KEEP_S = 60.0
"""Time for which the memory is kept without a process of the run that uses it."""

MAX_REQUEST_BYTES = 1 << 16

_NICENESS = 15
"""Increase of the niceness: at most 4 % of a core that a process of normal priority uses, too."""

_MAX_NICENESS = 19
_MAX_COPIES = 2
_MAX_WRITE_BYTES = 1 << 26
_READER_TIMEOUT_S = 5.0


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to the user of this process."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())


class Writer:
    """Serve the rank, and the readers of its checkpoints.

    Args:
        rank: Connection to the rank.
        listener: Socket to which readers connect.
        owners: Descriptors that are readable when their process has ended.
    """

    def __init__(self, rank: socket.socket, listener: socket.socket, owners: list[int]) -> None:
        self._rank: socket.socket | None = rank
        self._listener = listener
        self._owners = owners
        self._readers: list[socket.socket] = []
        self._kept_until = 0.0  # if there is neither the rank nor a reader
        self._is_released = False
        # Descriptors and sizes by path, by the ID of the checkpoint. The oldest one is first.
        self._files: dict[str, dict[str, tuple[int, int]]] = {}
        self._complete: dict[str, str] = {}  # IDs by the names under which readers request them

    def serve(self) -> None:
        """Serve until this process must end."""
        while (timeout := self._get_timeout()) is None or timeout > 0:
            sources = [self._rank, self._listener, *self._owners, *self._readers]
            ready, _, _ = select.select(
                [each for each in sources if each is not None], [], [], timeout
            )
            for source in ready:
                if source in self._owners:
                    self._owners.remove(source)
                    self._release()
                elif source is self._listener:
                    self._accept()
                elif source is self._rank:
                    self._on_rank(source)
                elif source in self._readers:
                    self._on_reader(source)

    def _get_timeout(self) -> float | None:
        if self._rank is not None or self._readers:
            return None
        return self._kept_until - time.monotonic()

    def _release(self) -> None:
        """End when the rank has ended."""
        self._is_released = True
        if self._rank is None:
            raise SystemExit

    # -- rank

    def _on_rank(self, rank: socket.socket) -> None:
        """Handle a request of the rank, or its death."""
        received = _receive(rank)
        if received is None:
            self._on_death()
            return
        request, descriptors = received
        if "end" in request:
            raise SystemExit
        if "complete" in request:
            self._set_complete(request["id"], request["complete"])
            reply: dict[str, object] | None = {}
        else:
            reply = self._write(rank, request, descriptors[0])
        if reply is not None:
            with contextlib.suppress(ConnectionError):  # the loop finds its death
                rank.sendall(json.dumps(reply).encode() + b"\n")

    def _on_death(self) -> None:
        self._rank = None
        if self._is_released:
            raise SystemExit
        if self._complete:
            self._kept_until = time.monotonic() + KEEP_S
        for checkpoint in self._files.keys() - self._complete.values():
            self._remove(checkpoint)

    def _write(
        self, rank: socket.socket, request: dict[str, Any], memory: int
    ) -> dict[str, object] | None:
        """Write a file, and return the reply; None if the rank no longer waits for it."""
        checkpoint, path, size = request["id"], request["path"], request["size"]
        if checkpoint not in self._files:
            while len(self._files) >= _MAX_COPIES:
                self._remove(next(iter(self._files)))
            self._files[checkpoint] = {}
        self._files[checkpoint][path] = memory, size
        try:
            is_written = _write_file(request["directory"], path, memory, size, rank)
        except OSError as error:
            return {"errno": error.errno, "reason": error.strerror}
        return {} if is_written else None

    def _set_complete(self, checkpoint: str, name: str) -> None:
        if checkpoint not in self._files:
            return  # it has no files, or an earlier process has written them and was killed
        # An older checkpoint of this name was not committed.
        self._complete[name] = checkpoint
        for memory, _ in self._files[checkpoint].values():
            fcntl.flock(memory, fcntl.LOCK_UN)

    def _remove(self, checkpoint: str) -> None:
        for memory, _ in self._files.pop(checkpoint).values():
            os.close(memory)
        self._complete = {
            name: other for name, other in self._complete.items() if other != checkpoint
        }

    # -- readers

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if is_same_user(connection):
            connection.settimeout(_READER_TIMEOUT_S)
            self._readers.append(connection)
        else:
            connection.close()

    def _on_reader(self, reader: socket.socket) -> None:
        """Handle a request of a reader, or the end of its connection."""
        try:
            data = reader.recv(MAX_REQUEST_BYTES)
            request = json.loads(data) if data else None
            if request is not None and "name" in request:
                self._send_files(reader, request["name"])
                return
        except (OSError, ValueError):
            request = None
        self._readers.remove(reader)
        reader.close()
        if request is not None and "release" in request:
            self._release()
        # If it was killed, another process may follow.
        self._kept_until = time.monotonic() + KEEP_S if request is None else 0.0

    def _send_files(self, reader: socket.socket, name: str) -> None:
        checkpoint = self._complete.get(name, "")
        for path, (memory, size) in self._files.get(checkpoint, {}).items():
            # Another open file: the lock belongs to the reader.
            copy = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
            try:
                fcntl.flock(copy, fcntl.LOCK_SH | fcntl.LOCK_NB)
                message = json.dumps({"path": path, "size": size}).encode()
                socket.send_fds(reader, [message], [copy])
            except BlockingIOError:  # the rank is replacing the content
                pass
            finally:
                os.close(copy)
        reader.sendall(b"{}")


def main(rank: socket.socket, listener: socket.socket, owners: list[int]) -> None:
    """Write the requested files, and keep them, until this process must end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C must not end it before its rank
    with contextlib.suppress(OSError):  # a container may not permit it
        _lower_priority()
    Writer(rank, listener, owners).serve()


def _lower_priority() -> None:
    if os.nice(0) + _NICENESS <= _MAX_NICENESS or not hasattr(os, "SCHED_IDLE"):
        os.nice(_NICENESS)
    else:  # Ray's workers already have a niceness, so that no value is much lower
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next request and the descriptor of its memory, if any; None at the end."""
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 1)
        while data and not data.endswith(b"\n"):
            more = connection.recv(MAX_REQUEST_BYTES)
            if not more:
                return None
            data += more
    except ConnectionError:
        return None
    return (json.loads(data), descriptors) if data else None


def _write_file(directory: str, path: str, memory: int, size: int, rank: socket.socket) -> bool:
    """Write a file; return False if the rank has ended meanwhile."""
    if parent := os.path.dirname(path):
        # Not the directory itself: it is deleted if the attempt has ended.
        os.makedirs(os.path.join(directory, parent), exist_ok=True)
    with open(os.path.join(directory, path), "wb") as file:
        offset = 0
        while offset < size:
            count = min(size - offset, _MAX_WRITE_BYTES)
            offset += os.sendfile(file.fileno(), memory, offset, count)
            if select.select([rank], [], [], 0)[0]:  # a rank that waits for the reply is silent
                return False
    return True


if __name__ == "__main__":
    with socket.socket(fileno=0) as rank, socket.socket(fileno=int(sys.argv[1])) as listener:
        main(rank, listener, [int(owner) for owner in sys.argv[2:]])
