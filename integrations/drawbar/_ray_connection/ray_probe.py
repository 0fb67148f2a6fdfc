"""Check that a Ray cluster replies at an address, without Ray, which would wait for a long time.

The check is one request of gRPC, which is based on HTTP/2 (RFC 9113).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from typing import BinaryIO

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 10.0  # a busy cluster may need seconds to reply

_FRAME_HEADER_SIZE = 9
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _END_HEADERS = 1, 4
_EMPTY_MESSAGE = bytes(5)
_TOKEN_SOURCES = "~/.ray/auth_token, RAY_AUTH_TOKEN_PATH, or RAY_AUTH_TOKEN"
_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # in Ray 2.50 to 2.60
_ERROR_STATUSES = tuple(bytes([0x80 + index]) for index in range(9, 15))
"""First byte of encoded headers with a status such as 404, which gRPC does not use."""
_UNAUTHENTICATED = b"grpc-status\x0216"  # a header and its value of two bytes


def check_reachable(address: str, *, sends_token: bool | None = None) -> None:
    """Check that a Ray cluster replies at `host:port`, and accepts the token of this process.

    Ray itself would wait for 20 s, and print warnings. With `RAY_USE_TLS`, this function checks
    only that a process accepts the connection.

    Args:
        address: `host:port`, with or without `ray://`. Others are not checked.
        sends_token: Whether Ray sends the token, if there is one. Default: if RAY_AUTH_MODE=token.

    Raises:
        ConnectionError: No process accepts the connection, or the process is no Ray cluster.
        PermissionError: The cluster requires another token.

    Example:
        ```python
        check_reachable(os.environ["RAY_ADDRESS"])
        ```
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # for example "auto"
    token, is_ray, header_block = _read_token(sends_token), False, b""
    endpoint = (host.strip("[]"), int(port))
    try:
        with socket.create_connection(endpoint, timeout=CONNECT_TIMEOUT_S) as connection:
            if _uses_tls():
                return
            connection.settimeout(REPLY_TIMEOUT_S)
            with connection.makefile("rb") as reply:
                if _is_http2_server(connection, reply):
                    header_block = _request(connection, reply, address, token or "")
                    is_ray = header_block[:1] not in _ERROR_STATUSES
    except OSError as error:
        raise ConnectionError(f"No Ray cluster at {address}: {error}") from error
    if not is_ray:
        raise ConnectionError(
            f"No Ray cluster at {address}: another program uses this port. Pass the address that "
            "'ray start' has printed with --address, or correct or unset RAY_ADDRESS. If the "
            "cluster uses TLS, set RAY_USE_TLS=1."
        )
    if token is not None and _UNAUTHENTICATED in header_block:
        advice = (
            f"The one in {_TOKEN_SOURCES} is wrong: copy it from the head node."
            if token
            else f"Set RAY_AUTH_MODE=token, and provide the token in {_TOKEN_SOURCES}."
        )
        raise PermissionError(f"The Ray cluster at {address} requires a token. {advice}")


def find_local_address() -> str | None:
    """Return the address that `ray start` recorded on this machine, as used by `ray.init()`.

    Reads Ray's address file as `ray._common.utils.get_ray_address_file` does, without importing
    Ray, which takes a second. The cluster may have ended.
    """
    directory = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    try:
        address = Path(directory, "ray", "ray_current_cluster").read_text(errors="replace").strip()
    except OSError:
        return None
    return address if re.fullmatch(r"\S+:\d+", address) else None


def find_running_cluster() -> str:
    """Find the cluster that `ray start` has started on this machine.

    Ray keeps the address of a cluster that was killed, and `ray.init()` then waits for minutes.

    Returns:
        Address of the cluster, "" if there is none or it has ended.

    Raises:
        PermissionError: The cluster requires another token.

    Example:
        ```python
        ray.init("auto" if find_running_cluster() else "local")
        ```
    """
    if address := find_local_address():
        with contextlib.suppress(ConnectionError):  # the cluster has ended
            # Ray sends the token without RAY_AUTH_MODE only if it finds the cluster by itself.
            check_reachable(address, sends_token=True)
            return address
    return ""


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")  # as in Ray


def _is_http2_server(connection: socket.socket, reply: BinaryIO) -> bool:
    """Return whether the reply to the start of an HTTP/2 connection is a SETTINGS frame."""
    try:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _make_frame(_SETTINGS))
        header = reply.read(_FRAME_HEADER_SIZE)
        is_settings = len(header) == _FRAME_HEADER_SIZE and header[3] == _SETTINGS
        if is_settings:
            reply.read(_get_payload_size(header))
        return is_settings
    except OSError:  # also if the program does not reply
        return False


def _request(connection: socket.socket, reply: BinaryIO, address: str, token: str) -> bytes:
    """Request the state of the cluster, and return the headers of the reply.

    They are encoded (HPACK), and empty if there is no reply.
    """
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": _METHOD,
        ":authority": address,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    if token:
        headers["authorization"] = f"Bearer {token}"
    encoded = b"".join(b"\0" + _encode(name) + _encode(headers[name]) for name in headers)
    request = _make_frame(_HEADERS, _END_HEADERS, 1, encoded)
    request += _make_frame(_DATA, _END_STREAM, 1, _EMPTY_MESSAGE)
    block = b""
    try:
        connection.sendall(request)
        while len(header := reply.read(_FRAME_HEADER_SIZE)) == _FRAME_HEADER_SIZE:
            payload = reply.read(_get_payload_size(header))
            kind, flags, stream = header[3], header[4], int.from_bytes(header[5:])
            if stream == 1 and kind == _HEADERS:
                block += payload
            if kind == _GOAWAY or (stream == 1 and (kind == _RST_STREAM or flags & _END_STREAM)):
                break
    except OSError:  # Ray reports the problem
        pass
    return block


def _get_payload_size(header: bytes) -> int:
    return int.from_bytes(header[:3])


def _make_frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Return an HTTP/2 frame."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def _encode(text: str) -> bytes:
    """Return a string as HPACK (RFC 7541, section 5.2) encodes it without compression."""
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, size = len(data) - 127, bytearray([127])
    while rest >= 128:
        size.append(rest % 128 + 128)
        rest //= 128
    return bytes([*size, rest]) + data


def _read_token(sends_token: bool | None) -> str | None:
    """Return the token that Ray sends, or "" if it sends none. None if it is unknown here."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode is not None or sends_token is None:
        sends_token = (mode or "").lower() == "token"
    if not sends_token:
        return ""
    if os.environ.get("RAY_ENABLE_K8S_TOKEN_AUTH"):
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    try:
        return Path(path).expanduser().read_text().strip()
    except (OSError, ValueError):
        return None  # Ray explains a missing token
