"""Publish the metrics of runs in progress: on an HTTP server, and to Ray.

The server runs if `DRAWBAR_METRICS_PORT` is set. All runs of the process share it. Publishing never
blocks or fails a run.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from drawbar._base.packages import make_import_error
from drawbar._base.wording import escape_surrogates
from drawbar._observe.prometheus import CONTENT_TYPE, format_metrics
from drawbar._observe.run_metrics import METRICS, MetricValue, RunMetrics
from drawbar._records.event_stream import Emit
from drawbar._records.journal import decode_readable_events
from drawbar._records.live_events import Event, Notice
from drawbar.train._controller.run import OpenRun

PORT_VARIABLE = "DRAWBAR_METRICS_PORT"
HOST_VARIABLE = "DRAWBAR_METRICS_HOST"

_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
_REQUEST_TIMEOUT_S = 10.0
RAY_PERIOD_S = 10.0
"""Time in seconds between updates of Ray's metrics. Ray exports them with a similar period."""

_logger = logging.getLogger("drawbar.train")
_gauges: dict[str, Any] = {}
_gauges_lock = threading.Lock()


class MetricsServer:
    """Server that exists while at least one run is registered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: list[RunMetrics] = []
        self._server: _HttpServer | None = None

    def add(self, run: RunMetrics) -> str:
        """Add a run, and start the server if necessary.

        Returns:
            A line for the user: the URL if any port may be used, or a warning; "" if there is none.
        """
        with self._lock:
            text = ""
            if self._server is None:
                try:
                    text = self._start()
                except (ImportError, OSError, OverflowError, ValueError) as error:
                    return f"Metrics are not served ({_describe_settings()}): {error}"
            self._runs.append(run)
            return text

    def _start(self) -> str:
        # Check it now: a scrape could only reply with an error.
        try:
            import prometheus_client  # noqa: F401
        except ImportError as error:
            raise make_import_error("prometheus_client", extra="metrics") from error
        host = os.environ.get(HOST_VARIABLE) or "127.0.0.1"
        port = int(os.environ[PORT_VARIABLE])
        self._server = _HttpServer(host, port, self._format)
        threading.Thread(
            target=self._server.serve_forever, name="drawbar-metrics", daemon=True
        ).start()
        name = f"[{host}]" if ":" in host else host
        return "" if port else f"metrics: http://{name}:{self._server.server_address[1]}/metrics"

    def remove(self, run: RunMetrics) -> None:
        """Remove a run, and stop the server after the last one."""
        with self._lock:
            if run in self._runs:
                self._runs.remove(run)
            server = self._server
            if server is None or self._runs:
                return
            self._server = None
            server.shutdown()
            server.server_close()

    def _format(self) -> bytes:
        now = time.time()
        # By key: the same run cannot be active twice, but an ended one may still be registered.
        runs = {run.key: run for run in list(self._runs)}
        return format_metrics(run.collect(now) for run in runs.values())


SERVER = MetricsServer()
"""The server of this process."""


def _describe_settings() -> str:
    names = PORT_VARIABLE, HOST_VARIABLE
    return ", ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))


class _HttpServer(ThreadingHTTPServer):
    """Server for `/metrics`. Each request has a thread."""

    def __init__(self, host: str, port: int, format_runs: Callable[[], bytes]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.format_runs = format_runs
        self.checks_host = _is_loopback(host)
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of connections: the client will scrape again."""


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer
    server_version = "drawbar"
    sys_version = ""
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        """Reply with the metrics."""
        if self.server.checks_host and _get_host(self.headers.get("Host")) not in _LOOPBACK_NAMES:
            self.send_error(403, "The Host header does not name this machine")
        elif urlsplit(self.path).path != "/metrics":
            self.send_error(404, "The metrics are at /metrics")
        else:
            body = self.server.format_runs()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # overrides the base
        """Log nothing."""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _get_host(header: str | None) -> str | None:
    """Return the host of a `Host` header, without the port."""
    try:
        return urlsplit(f"//{header or ''}").hostname
    except ValueError:
        return None


class MetricsPublisher:
    """Watcher that publishes the metrics of a run.

    Args:
        run: The open run.
        emit: Callback that publishes events. It receives a notice with the URL or a warning.
        is_on_ray: Whether this process is connected to Ray.
    """

    def __init__(self, run: OpenRun, emit: Emit, *, is_on_ray: bool) -> None:
        self._has_server = bool(os.environ.get(PORT_VARIABLE))
        self._is_enabled = self._has_server or is_on_ray
        self._metrics = RunMetrics(run.spec.name)
        self._closed = threading.Event()
        if self._is_enabled:
            # Earlier attempts of a resumed run, and the event that `open_run` has written.
            with contextlib.suppress(OSError):
                for event in decode_readable_events(run.directory.journal_path.read_bytes())[0]:
                    self._metrics.apply(event)
        if is_on_ray:
            threading.Thread(
                target=self._update_ray, name="drawbar-ray-metrics", daemon=True
            ).start()
        if self._has_server and (text := SERVER.add(self._metrics)):
            emit(Notice(text))

    def on_event(self, event: Event) -> None:
        """Update the metrics with an event."""
        if self._is_enabled:
            self._metrics.apply(event)

    def close(self) -> None:
        """Remove the metrics of the run. Ray's gauges are set once more, in their thread."""
        SERVER.remove(self._metrics)
        self._closed.set()

    def _update_ray(self) -> None:
        try:
            while not self._closed.wait(RAY_PERIOD_S):
                set_ray_gauges(self._metrics.collect(time.time()))
            set_ray_gauges(self._metrics.collect(time.time()))
        except Exception as error:  # Ray may have been shut down
            _logger.debug("metrics are not published to Ray: %r", error)


def set_ray_gauges(values: list[MetricValue]) -> None:
    """Set gauges of `ray.util.metrics`. Ray adds the prefix `ray_` to their names."""
    from ray.util.metrics import Gauge

    for name, labels, value in values:
        keys = METRICS[name].labels
        with _gauges_lock:
            gauge = _gauges.get(name)
            if gauge is None:
                gauge = _gauges[name] = Gauge(
                    name.removeprefix("ray_"), METRICS[name].help, tag_keys=keys
                )
        # Ray accepts only valid Unicode, and rejects empty tags.
        tags = {
            key: escape_surrogates(label) or "-" for key, label in zip(keys, labels, strict=True)
        }
        gauge.set(value, tags=tags)
