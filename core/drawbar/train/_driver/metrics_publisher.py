"""Publish the metrics of a run in progress: to the metrics server, and to Ray.

Publishing never blocks or fails the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import Any

from drawbar.train._controller.run import OpenRun
from drawbar.train._driver.metrics_server import PORT_VARIABLE, SERVER
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.journal import decode_readable_events
from drawbar.train._history.live_events import Event, Notice
from drawbar.train._history.run_metrics import METRICS, MetricValue, RunMetrics

RAY_PERIOD_S = 10.0
"""Time in seconds between updates of Ray's metrics. Ray exports them with a similar period."""

_logger = logging.getLogger("drawbar.train")
_gauges: dict[str, Any] = {}
_gauges_lock = threading.Lock()


class MetricsPublisher:
    """Watcher that publishes the metrics of a run.

    Args:
        run: The open run.
        is_on_ray: Whether this process is connected to Ray.
    """

    def __init__(self, run: OpenRun, *, is_on_ray: bool) -> None:
        self._has_server = bool(os.environ.get(PORT_VARIABLE))
        self._metrics: RunMetrics | None = None
        self._ray: _RayUpdates | None = None
        if not (self._has_server or is_on_ray):
            return
        self._metrics = RunMetrics(run.spec.name)
        # Earlier attempts of a resumed run, and the event that `open_run` has written.
        with contextlib.suppress(OSError):
            for event in decode_readable_events(run.directory.journal_path.read_bytes())[0]:
                self._metrics.apply(event)
        if is_on_ray:
            self._ray = _RayUpdates(self._metrics)

    def start(self, emit: Emit) -> None:
        """Start to serve the metrics, and emit a notice with the URL or a warning."""
        if self._has_server and self._metrics is not None and (text := SERVER.add(self._metrics)):
            emit(Notice(text))

    def on_event(self, event: Event) -> None:
        """Update the metrics with an event."""
        if self._metrics is not None:
            self._metrics.apply(event)

    def close(self) -> None:
        """Remove the metrics of the run."""
        if self._metrics is not None and self._has_server:
            SERVER.remove(self._metrics)
        if self._ray is not None:
            self._ray.stop()


class _RayUpdates:
    """Thread that sets gauges of `ray.util.metrics`."""

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="drawbar-ray-metrics", daemon=True).start()

    def stop(self) -> None:
        """Update the gauges once more, without waiting for it."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(RAY_PERIOD_S):
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
            key: label.encode(errors="backslashreplace").decode() or "-"
            for key, label in zip(keys, labels, strict=True)
        }
        gauge.set(value, tags=tags)
