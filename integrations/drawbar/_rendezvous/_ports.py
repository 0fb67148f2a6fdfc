"""Reserve TCP ports that a framework binds later.

Both functions choose a port outside of the ephemeral range, from which the kernel assigns free
ports. The kernel also assigns a port that is bound at another address of the host, so a bound
socket alone does not keep other servers away. A lock keeps other Drawbar workers from using the
port.

- `held_port` also keeps a socket bound to the port. This works for JAX, whose gRPC server sets
  SO_REUSEPORT, and for torch's store, which sets SO_REUSEADDR like most servers. They can bind the
  port too, because the socket sets both options and does not listen.
- `reserved_port` is for LightGBM and TensorFlow, whose native code fails if the port is already
  bound. Therefore, no socket stays bound to it.

The lock is an abstract Unix socket whose name contains the port number. Only one process in a
network namespace can bind it, and the kernel releases it when that process ends.
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
_EPHEMERAL_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@contextmanager
def held_port(host: str) -> Iterator[int]:
    """Yield a free port that stays bound, without listening, while the context lasts.

    Other sockets can bind it only if they set SO_REUSEPORT or SO_REUSEADDR.

    Args:
        host: Address to bind.

    Raises:
        OSError: No port is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with reserved_port() as port, socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
        yield port


@contextmanager
def reserved_port(candidates: range | None = None) -> Iterator[int]:
    """Yield a TCP port that is free on all interfaces and reserved while the context lasts.

    Args:
        candidates: Ports to choose from, such as ports that a firewall allows. Default: 20000 to
            29999, then all above 1023, outside the ephemeral range if possible.

    Raises:
        OSError: None of the candidates is free.
    """
    for port in _shuffled(candidates):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
            # Lock first, so that only one Drawbar worker checks whether other processes use it.
            if _bind(lock, f"\0drawbar-port-{port}") and _is_free(port):
                yield port
                return
    ports = _ALL if candidates is None else candidates
    text = f"No TCP port from {ports.start} to {ports.stop - 1} is free on this node."
    raise OSError(errno.EADDRINUSE, text)


def _shuffled(candidates: range | None) -> Iterator[int]:
    """Yield the candidates in random order, so that concurrent processes rarely collide."""
    if candidates is not None:
        yield from random.SystemRandom().sample(candidates, len(candidates))
        return
    # Do not use the global generator: a training function may set the same seed on all ranks.
    ephemeral = _ephemeral_range()
    for ports in (_PREFERRED, _ALL):
        stable = [port for port in ports if port not in ephemeral] or list(ports)
        yield from random.SystemRandom().sample(stable, len(stable))


def _ephemeral_range() -> range:
    """Return the range of the kernel's ephemeral ports, which is empty if unknown."""
    try:
        low, high = map(int, _EPHEMERAL_FILE.read_text().split())
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
