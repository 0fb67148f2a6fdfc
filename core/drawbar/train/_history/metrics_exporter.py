"""Format the metrics of runs for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from drawbar.train._history.live_events import ResourcesSampled
from drawbar.train._history.run_history import RunHistory
from drawbar.train._history.run_metrics import METRICS, MetricValue, RunMetrics
from drawbar.train._history.run_record import RunRecord
from drawbar.train._history.timeline import FINAL_STATUSES
from drawbar.train._storage.filesystem import resolve_path
from drawbar.train._storage.run_directory import make_run_directory
from drawbar.train._wording import escape_surrogates

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the Prometheus text format."""


class MetricsExporter:
    """Format the metrics of stored runs in Prometheus' text format.

    The events of a run are processed again only if the run was read again. So pass the runs of a
    `RunCatalog`.

    Example:
        Print the metrics of all runs of a storage path:

            catalog = runs.RunCatalog(["/shared/runs"])
            exporter = runs.MetricsExporter()
            print(exporter.format(catalog.list_runs()).decode())
    """

    content_type = CONTENT_TYPE

    def __init__(self) -> None:
        self._cache: dict[str, tuple[RunRecord, RunMetrics, int]] = {}

    def format(self, records: Iterable[RunRecord]) -> bytes:
        """Return the metrics of runs.

        If several runs have the same name and ID, because a run directory was copied, only the
        first one is included.

        Args:
            records: The runs.

        Returns:
            Text for Prometheus, encoded in UTF-8.

        Raises:
            ImportError: `prometheus_client` is not installed.

        Example: `body = exporter.format(catalog.list_runs())`
        """
        now = time.time()
        cache = {}
        values: dict[tuple[str, str], list[MetricValue]] = {}
        for record in records:
            entry = self._cache.get(record.path)
            if entry is None or entry[0] is not record:
                try:
                    entry = record, *_compute(record)
                except OSError:
                    continue  # the run was deleted, or its storage does not respond
            cache[record.path] = entry
            _, metrics, num_reports = entry
            if metrics.key not in values:
                values[metrics.key] = metrics.collect(
                    now, status=record.status, num_reports=num_reports
                )
        self._cache = cache
        return format_metrics(values.values())


def _compute(record: RunRecord) -> tuple[RunMetrics, int]:
    """Return the metrics of a run and the number of its reports."""
    metrics = RunMetrics(record.name)
    history, _ = RunHistory.read_readable(make_run_directory(resolve_path(record.path)))
    for event in history.events:
        metrics.apply(event)
    num_reports = 0
    if record.status not in FINAL_STATUSES:
        num_reports = history.count_stored()
        metrics.on_activity(record.last_event_time)
        # Only the last sample of each node, at most of the largest number of nodes of a run.
        for sample in record.read_resources()[-4096:]:
            metrics.apply(ResourcesSampled(sample))
    return metrics, num_reports


def format_metrics(runs: Iterable[Iterable[MetricValue]]) -> bytes:
    """Return the metrics of several runs in Prometheus' text format.

    Raises:
        ImportError: `prometheus_client` is not installed.
    """
    # On first use, because it is optional and takes 50 ms.
    from prometheus_client import CollectorRegistry, generate_latest

    by_name: dict[str, list[MetricValue]] = {name: [] for name in METRICS}
    for values in runs:
        for value in values:
            by_name[value.name].append(value)
    registry = CollectorRegistry()
    registry.register(_Collector(by_name))
    return generate_latest(registry)


class _Collector:
    """Collector for `prometheus_client`."""

    def __init__(self, by_name: dict[str, list[MetricValue]]) -> None:
        self._by_name = by_name

    def collect(self) -> Iterable[Any]:
        """Yield the metric families that have values."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, values in self._by_name.items():
            info = METRICS[name]
            family_class = CounterMetricFamily if info.kind == "counter" else GaugeMetricFamily
            family = family_class(name, info.help, labels=info.labels)
            for value in values:
                family.add_metric([escape_surrogates(label) for label in value.labels], value.value)
            if values:
                yield family
