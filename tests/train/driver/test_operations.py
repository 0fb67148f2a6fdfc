"""The dashboard and the alert rules in docs/operations use metrics that a run exports."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from drawbar import train
from drawbar.train import runs
from tests.train.runs import fit

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, set[str]]]:
    """Values of the labels of each metric of a run in progress, on a node with a GPU."""
    storage = tmp_path_factory.mktemp("exported")

    def function() -> str:
        gpu = runs.GpuSample(
            index=0, utilization_percent=50, memory_used_bytes=10, memory_total_bytes=20
        )
        sample = runs.ResourceSample(
            time=time.time(),
            attempt=0,
            rank=0,
            node_rank=0,
            node="n",
            cpu_percent=50,
            rss_bytes=10,
            disk_free_bytes=10,
            disk_total_bytes=20,
            gpus=[gpu],
        )
        with open(storage / "run" / "resources.jsonl", "ab") as file:
            file.write(msgspec.json.encode(sample) + b"\n")
        train.set_progress(1, total=2)
        with train.checkpoint_dir() as path:
            (path / "model").touch()
            train.report({}, checkpoint=path)
        return runs.MetricsExporter().format([runs.find_run(storage / "run")]).decode()

    labels: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(fit(function, storage).return_value):
        for sample in family.samples:
            for label, value in sample.labels.items():
                labels.setdefault(sample.name, {}).setdefault(label, set()).add(value)
    return labels


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


def test_operations_files_use_only_exported_metrics(
    exported: dict[str, dict[str, set[str]]],
) -> None:
    expressions = list(iter_expressions())
    assert len(expressions) > 20
    used = {name for text in expressions for name in re.findall(r"\b(?:drawbar|ray)_\w+", text)}
    assert used <= exported.keys()
    missing = {name for name in exported if not name.startswith("ray_")} - used
    assert missing == {"drawbar_gpu_memory_bytes"}


def test_operations_files_use_only_existing_labels_and_values(
    exported: dict[str, dict[str, set[str]]],
) -> None:
    labels = {label for values in exported.values() for label in values}
    allowed = {
        "status": exported["drawbar_run_status"]["status"],
        "cause": exported["drawbar_restarts_total"]["cause"],
    }
    for text in iter_expressions():
        for label, values in re.findall(r'(\w+)\s*!?=~?\s*"([^"]*)"', text):
            assert label in labels, text
            assert label not in allowed or set(values.split("|")) <= allowed[label], text
        assert text.count("(") == text.count(")")


def test_monitoring_page_describes_exactly_the_exported_metrics(
    exported: dict[str, dict[str, set[str]]],
) -> None:
    page = (OPERATIONS / "monitoring.md").read_text()
    described = set(re.findall(r"`((?:drawbar|ray_train)_[a-z_]+)`", page))
    assert described == exported.keys()
