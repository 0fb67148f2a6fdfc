"""Process that writes files from shared memory to a directory.

It executes this file in a bare interpreter (`-I -S -E`), so that it starts in about 10 ms and uses
9 MB. For this reason, the file imports only a few modules of the standard library. It has one
thread, inherits neither locks nor devices of the rank, and ends when the rank closes the connection
or dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NICENESS = 15
"""Increase of the niceness: at most 4 % of a core that a process of normal priority uses, too."""

_MAX_NICENESS = 19
_MAX_REQUEST_BYTES = 1 << 16


def main(connection: socket.socket) -> None:
    """Write the requested files until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C must not end it before its rank
    with contextlib.suppress(OSError):  # a container may not permit it
        _lower_priority()
    while (received := _receive(connection)) is not None:
        request, memory = received
        try:
            _write_file(request["directory"], request["path"], memory, request["size"])
            reply: dict[str, object] = {}
        except OSError as error:
            reply = {"errno": error.errno, "reason": error.strerror}
        finally:
            os.close(memory)
        connection.sendall(json.dumps(reply).encode() + b"\n")


def _lower_priority() -> None:
    if os.nice(0) + _NICENESS <= _MAX_NICENESS or not hasattr(os, "SCHED_IDLE"):
        os.nice(_NICENESS)
    else:  # Ray's workers already have a niceness, so that no value is much lower
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _receive(connection: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Return the next request and the descriptor of its memory; None at the end."""
    data, descriptors, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 1)
    while data and not data.endswith(b"\n"):
        more = connection.recv(_MAX_REQUEST_BYTES)
        if not more:
            return None
        data += more
    return (json.loads(data), descriptors[0]) if data else None


def _write_file(directory: str, path: str, memory: int, size: int) -> None:
    if parent := os.path.dirname(path):
        # Not the directory itself: it is deleted if the attempt has ended.
        os.makedirs(os.path.join(directory, parent), exist_ok=True)
    with open(os.path.join(directory, path), "wb") as file:
        offset = 0
        while offset < size:
            offset += os.sendfile(file.fileno(), memory, offset, size - offset)


if __name__ == "__main__":
    with socket.socket(fileno=0) as rank:
        main(rank)
