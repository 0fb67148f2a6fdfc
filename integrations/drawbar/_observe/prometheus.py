"""Prometheus' text format for the metrics of runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from drawbar._base.wording import escape_surrogates
from drawbar._observe.run_metrics import METRICS, MetricValue

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the Prometheus text format."""


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
