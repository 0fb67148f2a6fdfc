"""`/metrics` of `drawbar ui`."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.ui.conftest import Client


def test_metrics_of_runs_in_all_states(client: Client) -> None:
    status, data, headers = client.send("metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    states = {
        sample.labels["run"]: sample.labels["status"]
        for family in text_string_to_metric_families(data.decode())
        for sample in family.samples
        if sample.name == "drawbar_run_status" and sample.value == 1
    }
    assert states["finished"] == "finished"
    assert states["failed"] == "failed"
    assert states["killed"] == "interrupted"
    assert states["no-journal"] == "unknown"


def test_metrics_rejects_foreign_host(client: Client) -> None:
    assert client.send("metrics", Host="attacker.example")[0] == 403
