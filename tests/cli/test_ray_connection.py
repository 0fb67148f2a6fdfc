"""The check of a Ray address before Ray connects, which would wait for a long time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import ray

from drawbar.cli import _ray_connection
from drawbar.cli._ray_connection import check_reachable
from tests.cli.conftest import Command


@contextmanager
def serve_http() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def serve(reply: bytes | None) -> Iterator[str]:
    """Reply to a connection and close it; with None, accept none, so that there is no reply."""

    def accept() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(reply or b"")

    with socket.create_server(("127.0.0.1", 0)) as server:
        if reply is not None:
            threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_check_reachable_of_http_server_names_the_remedy(prefix: str) -> None:
    with serve_http() as address:
        message = f"No Ray cluster at {prefix}{address}: another program uses this port"
        with pytest.raises(ConnectionError, match=message):
            check_reachable(prefix + address)


@pytest.mark.parametrize(
    "reply",
    [b"-ERR unknown command 'PRI'\r\n", b"", b"\x00", None],
    ids=["redis", "closed", "short", "silent"],
)
def test_check_reachable_of_another_program_raises(
    reply: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ray_connection, "REPLY_TIMEOUT_S", 0.2)
    with serve(reply) as address, pytest.raises(ConnectionError, match="another program"):
        check_reachable(address)


def test_check_reachable_with_tls_only_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with serve(None) as address:
        check_reachable(address)


def test_check_reachable_accepts_ray(ray_cluster: None) -> None:
    check_reachable(ray.get_runtime_context().gcs_address)


def test_doctor_with_address_of_another_program_prints_one_line(cli: Command) -> None:
    with serve_http() as address:
        result = cli("doctor", "--address", address)
    line = result.err.splitlines()[-1]
    assert line.startswith(f"drawbar: error: Cannot connect to a Ray cluster at '{address}': ")
    assert "another program uses this port" in line
    assert result.code == 2
