"""The dashboard and the alert rules in docs/operations use metrics that a run exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from drawbar.train._history.run_metrics import CAUSES, METRICS, STATES

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations"
LABELS = {label for info in METRICS.values() for label in info.labels}


def iter_expressions() -> Iterator[str]:
    dashboard = json.loads((OPERATIONS / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    rules = yaml.safe_load((OPERATIONS / "prometheus-alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert set(rule["annotations"]) == {"summary", "description"}
            yield rule["expr"]


# `test_metrics_of_run_with_restart` compares METRICS with the output of a real run.
def test_operations_files_use_only_exported_metrics() -> None:
    expressions = list(iter_expressions())
    assert len(expressions) > 20
    used = {name for text in expressions for name in re.findall(r"\b(?:drawbar|ray)_\w+", text)}
    assert used <= METRICS.keys()
    missing = {name for name in METRICS if not name.startswith("ray_")} - used
    assert missing == {"drawbar_gpu_memory_bytes"}


def test_operations_files_use_only_existing_labels_and_values() -> None:
    for text in iter_expressions():
        for label, values in re.findall(r'(\w+)\s*!?=~?\s*"([^"]*)"', text):
            assert label in LABELS, text
            allowed = {"state": STATES, "cause": CAUSES}.get(label)
            assert allowed is None or set(values.split("|")) <= set(allowed), text
        assert text.count("(") == text.count(")")


def test_monitoring_page_describes_all_metrics() -> None:
    page = (OPERATIONS / "monitoring.md").read_text()
    assert [name for name in METRICS if f"`{name}`" not in page] == []
