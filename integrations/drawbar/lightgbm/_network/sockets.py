"""Reset LightGBM's connections on failure, so that other ranks notice a dead peer.

When a process ends, the kernel closes its connections gracefully, unless they have unread data.
LightGBM treats a graceful close as "no data yet" and retries forever in C, where it cannot be
interrupted. If the connection is reset instead, LightGBM raises an error.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER, see socket(7): enabled with 0 seconds
_GRACEFUL = struct.pack("ii", 0, 0)


@contextmanager
def reset_connections_on_failure(machines: Sequence[str], port: int) -> Iterator[None]:
    """Reset this rank's connections if the context ends with an exception or the process dies.

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
    """Yield a duplicate of each open socket of this process. The caller closes it."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed in the meantime
            copy = os.dup(int(name))
            try:
                yield socket.socket(fileno=copy)
            except OSError:  # not a socket
                os.close(copy)


def _belongs_to_rank(connection: socket.socket, ports: set[int], port: int) -> bool:
    """Return whether a socket connects this rank; other ranks may be threads of the process."""
    if connection.family != socket.AF_INET:
        return False
    try:
        local_port, remote_port = connection.getsockname()[1], connection.getpeername()[1]
    except OSError:
        return False  # a listening socket
    return local_port == port or (remote_port in ports and local_port not in ports)
