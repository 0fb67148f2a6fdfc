"""Sockets of processes on this host."""

from __future__ import annotations

import socket
from pathlib import Path


def is_dead_socket(path: Path) -> bool:
    """Return True if no process listens on a socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            return True
        # The process may be alive. For example, the queue of its socket may be full.
        except OSError:
            return False
    return False
