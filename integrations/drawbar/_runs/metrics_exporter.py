"""Format the metrics of runs for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable

from drawbar._history.run_history import RunHistory
from drawbar._observe.prometheus import CONTENT_TYPE, format_metrics
from drawbar._observe.run_metrics import MetricValue, RunMetrics
from drawbar._records.timeline import FINAL_STATUSES
from drawbar._runs.run_record import RunRecord
from drawbar._storage.filesystem import resolve_path
from drawbar._storage.run_directory import make_run_directory


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
            metrics.add_sample(sample)
    return metrics, num_reports
