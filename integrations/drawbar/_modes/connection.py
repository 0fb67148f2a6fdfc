"""Frames over a socket: a TCP connection, or a pair that a child process has inherited.

A frame is its length in 4 bytes, followed by its content. Over TCP, both processes prove that they
know the same key. The handshake has a fixed size and precedes the frames:

    server -> client    PREAMBLE, nonce of the server
    client -> server    nonce of the client, proof of the client
    server -> client    proof of the server

A proof is the HMAC of the role and both nonces. It therefore is valid for one connection and one
direction only.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
import struct
import threading
import time
import weakref

from drawbar._process.codec import ProtocolError

PREAMBLE = b"drawbar1"
"""Name and version of the protocol."""

MAX_FRAME_BYTES = 1 << 30
"""Maximum size of a frame. The largest ones contain results of collectives and return values."""

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 20
_SMALL_FRAME_BYTES = 1 << 16


class AuthenticationError(ProtocolError):
    """The other side has not proved that it knows the key."""


class Connection:
    """Ordered frames over a connected socket. Any thread sends, and one thread receives.

    Args:
        connected: The socket, which this object closes.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._inode = os.fstat(connected.fileno()).st_ino
        self._send_lock = threading.Lock()
        _open_sockets.add(connected)

    def fileno(self) -> int:
        """Return the descriptor of the socket, which is readable when a frame has arrived."""
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send a frame. If the other side has ended, `receive` raises the error, not this method.

        Raises:
            ProtocolError: The frame is too large.
            OSError: Other code in this process has closed the descriptor of the connection.
        """
        if len(data) > MAX_FRAME_BYTES:
            raise ProtocolError(
                f"a message of {len(data)} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes. "
                "Send smaller values, or save them in a checkpoint"
            )
        header = _LENGTH.pack(len(data))
        self._check_descriptor()
        with self._send_lock, contextlib.suppress(OSError):
            if len(data) <= _SMALL_FRAME_BYTES:
                self._socket.sendall(header + data)
            else:  # do not copy large data
                self._socket.sendall(header)
                self._socket.sendall(data)

    def _check_descriptor(self) -> None:
        """Raise an error if other code has closed the descriptor, or uses its number for a file.

        A thread that waits in `receive` does not notice this.
        """
        descriptor = self._socket.fileno()
        if descriptor < 0:
            return  # closed by `close`
        inode = None
        with contextlib.suppress(OSError):
            inode = os.fstat(descriptor).st_ino
        if inode != self._inode and self._socket.fileno() >= 0:
            raise OSError(
                errno.EBADF,
                f"This process has closed file descriptor {descriptor}, its connection to Drawbar, "
                "for example with os.closerange(). Close only descriptors that the process has "
                "opened",
            )

    def receive(
        self, *, max_bytes: int = MAX_FRAME_BYTES, deadline: float | None = None
    ) -> bytearray:
        """Wait for the next frame and return it.

        Args:
            max_bytes: Maximum size of the frame.
            deadline: Time limit, as `time.monotonic()`.

        Raises:
            ProtocolError: The frame is larger than `max_bytes`.
            EOFError: The other side closed the connection.
            OSError: The connection is broken, or the deadline has passed.
        """
        (size,) = _LENGTH.unpack(_receive_exactly(self._socket, _LENGTH.size, deadline))
        if size > max_bytes:
            raise ProtocolError(f"a frame of {size} bytes exceeds the limit of {max_bytes} bytes")
        return _receive_exactly(self._socket, size, deadline)

    def close(self) -> None:
        """Close this side. A thread that receives on it raises an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def authenticate_client(connected: socket.socket, key: bytes, deadline: float) -> Connection:
    """Exchange proofs with a client that has connected, and return the connection.

    Args:
        connected: Socket of the connection.
        key: Key that both sides must know.
        deadline: Time limit, as `time.monotonic()`.

    Raises:
        AuthenticationError: The client does not know the key.
        EOFError: The client closed the connection.
        OSError: The connection is broken, or the deadline has passed.
    """
    _disable_send_delay(connected)
    server_nonce = secrets.token_bytes(_NONCE_BYTES)
    connected.settimeout(_get_remaining(deadline))
    connected.sendall(PREAMBLE + server_nonce)
    reply = _receive_exactly(connected, _NONCE_BYTES + _PROOF_BYTES, deadline)
    client_nonce, proof = bytes(reply[:_NONCE_BYTES]), bytes(reply[_NONCE_BYTES:])
    nonces = server_nonce + client_nonce
    if not hmac.compare_digest(proof, _compute_proof(key, b"client", nonces)):
        raise AuthenticationError("the process that connected does not know the key of the run")
    connected.sendall(_compute_proof(key, b"server", nonces))
    connected.settimeout(None)
    return Connection(connected)


def authenticate_server(connected: socket.socket, key: bytes, deadline: float) -> Connection:
    """Exchange proofs with a server, and return the connection.

    Args:
        connected: Socket of the connection.
        key: Key that both sides must know.
        deadline: Time limit, as `time.monotonic()`.

    Raises:
        AuthenticationError: The server does not know the key.
        ProtocolError: The server has another version of the protocol, or is another program.
        EOFError: The server closed the connection.
        OSError: The connection is broken, or the deadline has passed.
    """
    _disable_send_delay(connected)
    preamble = bytes(_receive_exactly(connected, len(PREAMBLE), deadline))
    if preamble != PREAMBLE:
        raise ProtocolError(
            f"expected {PREAMBLE!r} from rank 0, received {preamble!r}. Install the same version "
            "of Drawbar in all processes"
        )
    server_nonce = bytes(_receive_exactly(connected, _NONCE_BYTES, deadline))
    client_nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces = server_nonce + client_nonce
    connected.sendall(client_nonce + _compute_proof(key, b"client", nonces))
    proof = bytes(_receive_exactly(connected, _PROOF_BYTES, deadline))
    if not hmac.compare_digest(proof, _compute_proof(key, b"server", nonces)):
        raise AuthenticationError("the process at the address of rank 0 does not know the key")
    connected.settimeout(None)
    return Connection(connected)


def _close_in_fork() -> None:
    """Close all connections: a forked data loader must not keep them open after its parent dies."""
    for connected in list(_open_sockets):
        connected.close()


_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_fork)


def _compute_proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, PREAMBLE + role + nonces, "sha256")


def _disable_send_delay(connected: socket.socket) -> None:
    # Without it, the kernel holds back a small message until the previous one is acknowledged.
    with contextlib.suppress(OSError):  # not a TCP socket
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive_exactly(
    connected: socket.socket, count: int, deadline: float | None = None
) -> bytearray:
    data = bytearray()  # grows with the received data, not with the announced size
    while len(data) < count:
        if deadline is not None:
            connected.settimeout(_get_remaining(deadline))
        chunk = connected.recv(min(count - len(data), _READ_BYTES))
        if not chunk:
            raise EOFError("closed")
        data += chunk
    return data


def _get_remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the other process has not replied in time")
    return remaining
