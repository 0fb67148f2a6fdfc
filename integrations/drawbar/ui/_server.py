"""The HTTP server, from the standard library."""

from __future__ import annotations

import json
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from drawbar.train.backend import make_import_error
from drawbar.train.runs import MetricsExporter
from drawbar.ui._api import Api, RequestError
from drawbar.ui._assets import find_asset
from drawbar.ui._catalog import RunIndex
from drawbar.ui._plain import encode_json
from drawbar.ui._security import HEADERS, AccessRules

_MAX_BODY_BYTES = 10_000
_MAX_LENGTH_DIGITS = 20
_REQUEST_TIMEOUT_S = 30.0
_NUM_PORTS = 20


class UiServer(ThreadingHTTPServer):
    """HTTP server for the pages of runs. Each request has a thread.

    Args:
        index: The runs.
        host: Address on which to listen.
        port: Port; 0 for any free one. If it is in use, one of the next 19 ports is used.
        info: Reply of `api/info`.

    Raises:
        OSError: No port is free, or the address does not exist on this machine.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, index: RunIndex, host: str, port: int, info: Mapping[str, Any]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._closing = threading.Event()
        self._bind_free_port(host, port)
        self.rules = AccessRules(host, self.server_address[1])
        self.api = Api(index, info, self._closing.is_set)
        self._index = index
        self._exporter = MetricsExporter()

    def format_metrics(self) -> bytes:
        """Return the metrics of all runs for Prometheus."""
        try:
            return self._exporter.format(run.record for run in self._index.refresh().values())
        except ImportError as error:
            missing = make_import_error("prometheus_client", extra="metrics")
            raise RequestError(501, str(missing)) from error

    def _bind_free_port(self, host: str, port: int) -> None:
        ports = [0] if port == 0 else range(port, min(port + _NUM_PORTS, 65_536))
        for candidate in ports:
            try:
                super().__init__((host, candidate), _Handler)
            except OSError as error:
                if candidate == ports[-1] or error.errno not in _IN_USE:
                    text = error.strerror or str(error)
                    last = f" to {ports[-1]}" if len(ports) > 1 else ""
                    raise OSError(
                        error.errno,
                        f"The server cannot listen on {host}, port {port}{last}: {text}. "
                        "Set --host or --port",
                    ) from error
            else:
                return

    @property
    def url(self) -> str:
        """URL of the start page, with the token."""
        host = self.rules.host
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.rules.port}/?token={self.rules.token}"

    def close(self) -> None:
        """End the server: it accepts no requests, and long polls end."""
        self._closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of connections, such as a closed tab."""


_IN_USE = (98, 48, 13)  # EADDRINUSE on Linux and macOS, EACCES


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    server: UiServer
    protocol_version = "HTTP/1.1"
    server_version = "drawbar"
    sys_version = ""
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        """Reply to a GET request."""
        self._answer(self._get)

    def do_HEAD(self) -> None:
        """Reply with the headers of a GET request."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Reply to a POST request."""
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:  # overrides the base
        """Log nothing."""

    def _answer(self, reply: Any) -> None:
        try:
            if not self.server.rules.is_allowed_host(self.headers.get("Host")):
                raise RequestError(
                    403, "The Host header does not name this server. Open the printed URL."
                )
            reply()
        except RequestError as error:
            self._send_json(error.status, {"error": str(error)})
        except OSError as error:
            if isinstance(error, ConnectionError | TimeoutError):
                self.close_connection = True
                return
            self._send_json(503, {"error": f"The storage cannot be read: {error}"})
        except Exception as error:  # a bug must not hide the other pages
            traceback.print_exc()
            self._send_json(500, {"error": f"{type(error).__name__}: {error}"})

    def _split_url(self) -> SplitResult:
        try:
            return urlsplit(self.path)
        except ValueError as error:
            raise RequestError(400, f"The URL is not valid: {error}.") from error

    def _get(self) -> None:
        url = self._split_url()
        query = parse_qs(url.query, keep_blank_values=True)
        token = query.get("token", [None])[-1]
        rules = self.server.rules
        cookies = self.headers.get("Cookie")
        if rules.needs_token and not rules.has_token(cookies, token):
            raise RequestError(403, "The token is missing. Open the URL that the server printed.")
        path = unquote(url.path)
        if token is not None and rules.has_token(None, token):
            cookie = f"{rules.cookie_name}={rules.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(303, b"", "text/plain", {"Location": "/", "Set-Cookie": cookie})
        elif path.startswith("/api/"):
            parts = path.split("/")[2:]
            can_stop = rules.has_token(cookies, None)
            self._send_json(200, self.server.api.get(parts, query, can_stop=can_stop))
        elif path == "/metrics":
            self._send(200, self.server.format_metrics(), MetricsExporter.content_type)
        elif (asset := find_asset(path)) is not None:
            self._send(200, asset.data, asset.content_type)
        else:
            raise RequestError(404, "This page does not exist.")

    def _read_body(self) -> bytes:
        size = self.headers.get("Content-Length", "0")
        if not (size.isascii() and size.isdigit() and len(size) <= _MAX_LENGTH_DIGITS):
            self.close_connection = True
            raise RequestError(400, "The Content-Length header is not a valid number of bytes.")
        if int(size) > _MAX_BODY_BYTES:
            self.close_connection = True
            raise RequestError(413, f"The body must have at most {_MAX_BODY_BYTES} bytes.")
        return self.rfile.read(int(size))

    def _post(self) -> None:
        body = self._read_body()
        rules = self.server.rules
        if not rules.is_allowed_post(self.headers):
            raise RequestError(
                403, "Only a page that was opened with the printed URL can stop a run."
            )
        try:
            values = json.loads(body or b"{}")
        except ValueError as error:
            raise RequestError(400, f"The body is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise RequestError(400, "The body must be a JSON object.")
        parts = unquote(self._split_url().path).split("/")
        if parts[1:2] != ["api"]:
            raise RequestError(404, "This page does not exist.")
        self._send_json(200, self.server.api.post(parts[2:], values))

    def _send_json(self, status: int, value: dict[str, Any]) -> None:
        now = time.time()
        data = encode_json({"as_of": now, "server_time": now, **value})
        self._send(status, data, "application/json")

    def _send(
        self, status: int, data: bytes, content_type: str, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def start_in_thread(server: UiServer) -> threading.Thread:
    """Serve requests in a thread until `close` is called."""
    thread = threading.Thread(target=partial(server.serve_forever, 0.1), name="drawbar-ui")
    thread.daemon = True
    thread.start()
    return thread
