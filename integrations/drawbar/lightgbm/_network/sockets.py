"""LightGBM's connections, which it makes in C: a peer that dies must be noticed at their other end.

When a process ends, the kernel closes its connections in order, unless there is something in them
that it has not read. LightGBM takes the orderly end for "nothing yet" and asks again for ever, in
C, where nobody can interrupt it. A connection that is reset instead gives it an error.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER, socket(7): on, for 0 seconds
_GRACEFUL = struct.pack("ii", 0, 0)


@contextmanager
def reset_connections_on_failure(machines: Sequence[str], port: int) -> Iterator[None]:
    """Have this rank's connections reset if the context is left by an exception or a death.

    Args:
        machines: "address:port" of each rank.
        port: This rank's port.
    """
    _set_linger(machines, port, _RESET)
    yield
    _set_linger(machines, port, _GRACEFUL)  # another rank may still be reading


def _set_linger(machines: Sequence[str], port: int, value: bytes) -> None:
    ports = {int(machine.rpartition(":")[2]) for machine in machines}
    for connection in _iter_process_sockets():
        with connection:
            if _belongs_to_rank(connection, ports, port):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, value)


def _iter_process_sockets() -> Iterator[socket.socket]:
    """Give another handle on each of them, to be closed."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it is closed meanwhile
            copy = os.dup(int(name))
            try:
                yield socket.socket(fileno=copy)
            except OSError:  # it is no socket
                os.close(copy)


def _belongs_to_rank(connection: socket.socket, ports: set[int], port: int) -> bool:
    """Whether it is between this rank and another one; a process may hold those of other ranks."""
    if connection.family != socket.AF_INET:
        return False
    try:
        local_port, remote_port = connection.getsockname()[1], connection.getpeername()[1]
    except OSError:
        return False  # it listens
    return local_port == port or (remote_port in ports and local_port not in ports)
