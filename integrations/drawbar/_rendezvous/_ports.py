"""Ports that a framework can bind itself, later.

JAX's gRPC binds with SO_REUSEPORT, and torch's store with SO_REUSEADDR, as most servers do. So the
port can be held by a socket that does so too, and is not listening.

LightGBM and TensorFlow take a port number and bind it in C, without SO_REUSEPORT, so nobody can
hold the port for them: a socket that is bound already makes them fail, and one that was bound and
closed may be another's by then. So a port is reserved by a name: an abstract Unix socket called so.
Such a name belongs to the network namespace, as ports do; one process can have it, and the kernel
frees it however that process ends. All of Drawbar's workers look there first, and the ports lie
outside the range from which the kernel gives ports to sockets that ask for any.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFERRED = range(20000, 30000)  # Ray's workers have 10002-19999, Kubernetes' node ports 30000-
_ALL = range(1024, 65536)
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@contextmanager
def held_port(host: str) -> Iterator[int]:
    """Bind a free port without listening, so that only who asks for it by number gets it.

    And of these only who shares ports, as gRPC may, or may follow another one, as servers do.

    Args:
        host: The address to bind it on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])


@contextmanager
def reserved_port(candidates: range | None = None) -> Iterator[int]:
    """Give a TCP port that is free on all interfaces and stays so while the context lasts.

    Args:
        candidates: Where to look, as when a firewall lets only some ports through. Default: the
            ports from 20000 to 29999, and if none of them is free all above 1023; without those
            that the kernel gives out by itself, if there are others.

    Raises:
        OSError: None of the candidates is free.
    """
    for port in _shuffled(candidates):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
            # The name first: it decides among Drawbar's own workers, and the look at the port among
            # all.
            if _bind(name, f"\0drawbar-port-{port}") and _is_free(port):
                yield port
                return
    raise OSError(errno.EADDRINUSE, f"no port of {candidates or _ALL} is free on this node")


def _shuffled(candidates: range | None) -> Iterator[int]:
    """Go through the candidates in random order, so that many who start at once seldom meet."""
    if candidates is not None:
        yield from random.SystemRandom().sample(candidates, len(candidates))
        return
    # Not by `random`, which a training function may have seeded alike on all ranks.
    ephemeral = _ephemeral()
    for ports in (_PREFERRED, _ALL):
        chosen = [port for port in ports if port not in ephemeral] or list(ports)
        yield from random.SystemRandom().sample(chosen, len(chosen))


def _ephemeral() -> range:
    """Give the ports that the kernel chooses from; none where it does not tell."""
    try:
        low, high = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return range(0)
    return range(low, high + 1)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return _bind(probe, ("0.0.0.0", port))


def _bind(socket_: socket.socket, address: str | tuple[str, int]) -> bool:
    try:
        socket_.bind(address)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return False
        raise
    return True
