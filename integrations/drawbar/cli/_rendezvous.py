"""Rendezvous of the commands that torchrun's users start on each node.

One command is the head: with `--rdzv-backend static`, the one with node rank 0, otherwise the one
that can listen at `--rdzv-endpoint`. It starts Ray and the run when enough nodes have joined. The
others add their node to Ray, and end with the exit code of the run.

    node -> head  {"run_id": "...", "node_rank": 1}         join
    head -> node  {"node_rank": 1, "address": "10.0.0.1:6379", "auth_mode": "token"}
    head -> node  {"exit_code": 0}                          end of the run
    head -> node  {"error": "..."}                          instead of a reply

The connection shows each side that the other one is alive.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drawbar.cli._output import CommandError

DEFAULT_PORTS = {"static": 29500, "c10d": 29400}
_RETRY_INTERVAL_S = 0.2
_HELLO_TIMEOUT_S = 10.0
_MAX_MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True)
class Rendezvous:
    """Options of the rendezvous.

    Attributes:
        host: Host of the head.
        port: Port of the head.
        min_nodes: Number of nodes with which the run can start.
        max_nodes: Maximum number of nodes.
        run_id: The same for all nodes of a run.
        node_rank: Rank of this node, or None if the order of arrival decides.
        is_host: Whether this node is the head. None: if it can listen at the host and port.
        join_timeout: Seconds to wait for `min_nodes` nodes.
        last_call_timeout: Seconds to wait for more nodes afterwards.
        local_address: Address of this node. Default: Ray finds it.
    """

    host: str
    port: int
    min_nodes: int
    max_nodes: int
    run_id: str = "none"
    node_rank: int | None = None
    is_host: bool | None = None
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    local_address: str = ""

    @classmethod
    def from_options(cls, values: Mapping[str, str], nodes: tuple[int, int]) -> Rendezvous | None:
        """Return the rendezvous that torchrun's options describe, or None if they do not.

        Args:
            values: Options of torchrun with their values.
            nodes: Minimum and maximum number of nodes.

        Raises:
            CommandError: An option has an invalid value.
        """
        if nodes[1] == 1 or not values.keys() & {"--node-rank", "--rdzv-endpoint", "--master-addr"}:
            return None
        backend = values.get("--rdzv-backend", "static")
        if backend not in DEFAULT_PORTS:
            raise CommandError(f"--rdzv-backend must be static or c10d, found {backend!r}.")
        conf = _parse_conf(values.get("--rdzv-conf", ""))
        master = values.get("--master-addr", "127.0.0.1")
        endpoint = values.get("--rdzv-endpoint", "")
        if backend == "static" and not endpoint:
            endpoint = f"{master}:{values.get('--master-port', '')}".removesuffix(":")
        host, port = _split_endpoint(endpoint, DEFAULT_PORTS[backend])
        node_rank, is_host = None, _parse_is_host(conf)
        if backend == "static":
            node_rank = _parse_node_rank(values.get("--node-rank", "0"), nodes[1])
            is_host = node_rank == 0
        return cls(
            host,
            port,
            *nodes,
            run_id=values.get("--rdzv-id", "none"),
            node_rank=node_rank,
            is_host=is_host,
            join_timeout=_parse_seconds(conf, "join_timeout", 600.0),
            last_call_timeout=_parse_seconds(conf, "last_call_timeout", 30.0),
            local_address=values.get("--local-addr", ""),
        )

    def listen(self) -> socket.socket | None:
        """Return a listening socket if this node is the head, otherwise None.

        Raises:
            CommandError: This node must be the head, and cannot listen at the port.
        """
        if self.is_host is False:
            return None
        try:
            if self.is_host:
                return socket.create_server(("", self.port))
            # This fails with EADDRNOTAVAIL on other hosts, and with EADDRINUSE on this host if
            # another command is the head.
            family, *_, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[
                0
            ]
            return socket.create_server(address, family=family)
        except OSError as error:
            if not self.is_host and error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                return None
            raise CommandError(f"Cannot listen at {self.host}:{self.port}: {error}") from error


def _split_endpoint(endpoint: str, default_port: int) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(default_port)
    if not host or not port.isdecimal():
        raise CommandError(
            f"The address of the rendezvous must be HOST:PORT, found {endpoint!r}. Set "
            "--rdzv-endpoint, or --master-addr and --master-port."
        )
    return host.strip("[]"), int(port)


def _parse_conf(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in text.strip("'\" ").split(",") if part.strip())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _parse_is_host(conf: Mapping[str, str]) -> bool | None:
    return conf["is_host"].lower() in ("1", "true", "t", "yes") if "is_host" in conf else None


def _parse_seconds(conf: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(conf.get(name, default))
    except ValueError:
        raise CommandError(
            f"--rdzv-conf {name} must be a number of seconds, found {conf[name]!r}."
        ) from None


def _parse_node_rank(text: str, max_nodes: int) -> int:
    if not text.isdecimal() or int(text) >= max_nodes:
        raise CommandError(
            f"--node-rank must be a number from 0 to {max_nodes - 1}, found {text!r}. --nnodes "
            "is the number of nodes."
        )
    return int(text)


class Peer:
    """Connection to the command on another node."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._file = connection.makefile("r", encoding="utf-8")

    def send(self, **message: object) -> None:
        """Send a message, unless the other command has ended."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def receive(self) -> dict[str, Any]:
        """Wait for a message.

        Raises:
            ConnectionError: The other command has ended, or is not Drawbar.
            TimeoutError: There was no message within the timeout of the connection.
        """
        line = self._file.readline(_MAX_MESSAGE_BYTES)
        try:
            message = json.loads(line)
        except ValueError:
            raise ConnectionError("the other command has ended") from None
        if not isinstance(message, dict):
            raise ConnectionError("the other command is not Drawbar")
        return message

    def is_alive(self) -> bool:
        """Return whether the other command has not ended."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self.connection.close()


@dataclass
class Head:
    """Head of a rendezvous: accepts the commands of other nodes.

    Args:
        rendezvous: Options of the rendezvous.
        listener: Socket at which it listens.
    """

    rendezvous: Rendezvous
    listener: socket.socket
    peers: dict[int, Peer] = field(default_factory=dict)
    _cluster: dict[str, str] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        """Accept connections in a thread."""
        threading.Thread(target=self._accept_all, name="drawbar-rendezvous", daemon=True).start()

    def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._accept, args=(connection,), daemon=True).start()

    def _accept(self, connection: socket.socket) -> None:
        connection.settimeout(_HELLO_TIMEOUT_S)
        peer = Peer(connection)
        try:
            hello = peer.receive()
            run_id, rank = hello["run_id"], hello["node_rank"]
            connection.settimeout(None)
        except (OSError, LookupError):  # another program
            peer.close()
            return
        with self._changed:
            error = self._find_error(run_id, rank)
            if error:
                peer.send(error=error)
                peer.close()
                return
            if rank is None:
                rank = next(n for n in itertools.count(1) if n not in self.peers)
            self.peers[rank] = peer
            if self._cluster:
                peer.send(node_rank=rank, **self._cluster)
            self._changed.notify_all()

    def _find_error(self, run_id: object, node_rank: object) -> str:
        """Return why a node must not join; "" if it may. Removes nodes that have ended."""
        for rank in [rank for rank, peer in self.peers.items() if not peer.is_alive()]:
            self.peers.pop(rank).close()
        expected = self.rendezvous
        if run_id != expected.run_id:
            return (
                f"The first node has --rdzv-id {expected.run_id}, and this node has {run_id}. Use "
                "the same on all nodes."
            )
        if node_rank in (0, *self.peers):
            return f"Another node has --node-rank {node_rank}."
        if len(self.peers) + 1 >= expected.max_nodes:
            return f"All {expected.max_nodes} nodes of --nnodes have joined already."
        if self._cluster and expected.min_nodes == expected.max_nodes:
            return "The run has started already."
        return ""

    def wait_for_nodes(self) -> int:
        """Wait for the other nodes.

        Returns:
            The number of nodes.

        Raises:
            CommandError: Too few nodes have joined in time.
        """
        low, high = self.rendezvous.min_nodes, self.rendezvous.max_nodes
        with self._changed:
            has_enough = self._changed.wait_for(
                lambda: len(self.peers) + 1 >= low, self.rendezvous.join_timeout
            )
            if not has_enough:
                raise CommandError(
                    f"{len(self.peers) + 1} of {low} nodes have joined at {self.rendezvous.host}:"
                    f"{self.rendezvous.port} within {self.rendezvous.join_timeout:g} s. Run the "
                    "command on each node, or set --rdzv-conf join_timeout=SECONDS."
                )
            self._changed.wait_for(
                lambda: len(self.peers) + 1 == high, self.rendezvous.last_call_timeout
            )
            return len(self.peers) + 1

    def publish(self, address: str, auth_mode: str) -> None:
        """Tell all nodes how to join the Ray cluster, also those that join later.

        Args:
            address: Address of the cluster.
            auth_mode: RAY_AUTH_MODE of the cluster. Nodes have or get the token in other ways.
        """
        with self._changed:
            self._cluster = {"address": address, "auth_mode": auth_mode}
            for rank, peer in self.peers.items():
                peer.send(node_rank=rank, **self._cluster)

    def require_alive(self) -> None:
        """Check that no command of another node has ended.

        Raises:
            CommandError: A command has ended.
        """
        with self._changed:
            ended = [rank for rank, peer in self.peers.items() if not peer.is_alive()]
        if ended:
            raise CommandError(
                f"The command on node {ended[0]} has ended before the run started. Its output "
                "shows the reason."
            )

    def close(self, exit_code: int) -> None:
        """Send the exit code of the run to all nodes."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept()
        self.listener.close()
        with self._changed:
            for peer in self.peers.values():
                peer.send(exit_code=exit_code)
                peer.close()


@dataclass(frozen=True)
class Invitation:
    """Reply of the head: the rank of this node, and how to join the Ray cluster."""

    node_rank: int
    address: str
    auth_mode: str


def connect_to_head(rendezvous: Rendezvous) -> tuple[Peer, Invitation]:
    """Join the run of another node.

    Returns:
        The connection and the reply.

    Raises:
        CommandError: The head does not reply in time, or rejects this node.
    """
    deadline = time.monotonic() + rendezvous.join_timeout
    while True:
        try:
            connection = socket.create_connection((rendezvous.host, rendezvous.port), 5.0)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise CommandError(
                    f"No command has listened at {rendezvous.host}:{rendezvous.port} within "
                    f"{rendezvous.join_timeout:g} s: {error}. Run the command on the node with "
                    "this address."
                ) from error
            time.sleep(_RETRY_INTERVAL_S)
    connection.settimeout(None)
    peer = Peer(connection)
    peer.send(run_id=rendezvous.run_id, node_rank=rendezvous.node_rank)
    try:
        reply = peer.receive()
    except ConnectionError as error:
        peer.close()
        raise CommandError(
            f"The command at {rendezvous.host}:{rendezvous.port} has ended before the run started."
        ) from error
    if "error" in reply:
        peer.close()
        raise CommandError(reply["error"])
    return peer, Invitation(**reply)
