"""Hold or reserve TCP ports that a framework binds later.

JAX's gRPC binds with SO_REUSEPORT, and torch's store with SO_REUSEADDR, like most servers. Their
port can be held by a bound socket that sets the same options and does not listen.

LightGBM and TensorFlow bind a given port number in C without SO_REUSEPORT. They fail if the port is
already bound, and a port that was bound and closed may be taken by another process. Ports for them
are therefore reserved by name, with an abstract Unix socket. Its name is local to the network
namespace like the port, only one process can bind it, and the kernel releases it when that process
ends. All Drawbar workers check the name first, and the ports are outside the kernel's range for
automatically assigned ports.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFERRED = range(20000, 30000)  # Ray's workers use 10002-19999, Kubernetes node ports 30000-32767
_ALL = range(1024, 65536)
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@contextmanager
def held_port(host: str) -> Iterator[int]:
    """Yield a free port that stays bound, without listening, while the context lasts.

    Only sockets that request this port and share it (SO_REUSEPORT) or reuse it (SO_REUSEADDR) can
    bind it.

    Args:
        host: Address to bind.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])


@contextmanager
def reserved_port(candidates: range | None = None) -> Iterator[int]:
    """Yield a TCP port that is free on all interfaces and reserved while the context lasts.

    Args:
        candidates: Ports to choose from, for example those that a firewall allows. Default: 20000
            to 29999, then all above 1023, without the kernel's range for automatically assigned
            ports if possible.

    Raises:
        OSError: None of the candidates is free.
    """
    for port in _shuffled(candidates):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
            # Bind the name first: it decides between Drawbar's workers. The port itself is then
            # checked against all other processes.
            if _bind(name, f"\0drawbar-port-{port}") and _is_free(port):
                yield port
                return
    raise OSError(errno.EADDRINUSE, f"No port of {candidates or _ALL} is free on this node.")


def _shuffled(candidates: range | None) -> Iterator[int]:
    """Yield the candidates in random order, so that concurrent processes rarely collide."""
    if candidates is not None:
        yield from random.SystemRandom().sample(candidates, len(candidates))
        return
    # Do not use the global generator, which a training function may seed equally on all ranks.
    ephemeral = _ephemeral()
    for ports in (_PREFERRED, _ALL):
        chosen = [port for port in ports if port not in ephemeral] or list(ports)
        yield from random.SystemRandom().sample(chosen, len(chosen))


def _ephemeral() -> range:
    """Return the kernel's range for automatically assigned ports; empty if it is unknown."""
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
