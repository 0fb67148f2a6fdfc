"""The metrics of runs in progress, as Prometheus reads them."""

from __future__ import annotations

import http.client
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from drawbar import train
from drawbar.train import TrainingFailedError
from drawbar.train._driver.metrics_server import MetricsServer
from drawbar.train._history.run_metrics import METRICS, RunMetrics
from tests.train.event_factories import attempt_started, reported, workers_started
from tests.train.runs import fit

RUN_LABELS = ("run", "run_id", "ray_train_run_name", "ray_train_run_id")

Values = dict[tuple[str, ...], float]


def parse(text: str, name: str) -> Values:
    """Return the values of a metric by its labels, without the labels of the run."""
    return {
        tuple(value for key, value in sample.labels.items() if key not in RUN_LABELS): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def scrape(port: int, path: str = "/metrics", host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("GET", path, headers={"Host": host} if host else {})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> MetricsServer:
    monkeypatch.setenv("DRAWBAR_METRICS_PORT", "0")
    return MetricsServer()


def make_run(name: str) -> RunMetrics:
    run = RunMetrics(name)
    for event in (attempt_started(0), workers_started(2), reported(0, 0, {}), reported(1, 0, {})):
        run.apply(event)
    return run


def test_metrics_server_serves_several_runs_and_stops_after_the_last(
    server: MetricsServer,
) -> None:
    first, second = make_run("a"), make_run('b "\n\udcff')
    assert server.add(first) == f"metrics: http://127.0.0.1:{server.port}/metrics"
    assert server.add(second) == ""
    port = server.port
    assert port is not None
    status, text = scrape(port)
    assert status == 200
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "drawbar_reports_total"
    ]
    assert {sample.labels["run"]: sample.value for sample in samples} == {
        "a": 2,
        'b "\n\\udcff': 2,
    }
    server.remove(first)
    assert 'run="a"' not in scrape(port)[1]
    server.remove(second)
    assert server.port is None
    with pytest.raises(ConnectionRefusedError):
        scrape(port)


def test_metrics_server_rejects_other_hosts_and_paths(server: MetricsServer) -> None:
    run = make_run("a")
    server.add(run)
    assert server.port is not None
    assert scrape(server.port, host="attacker.example:80")[0] == 403
    assert scrape(server.port, host="[::1]:9000")[0] == 200
    assert scrape(server.port, path="/journal.jsonl")[0] == 404
    server.remove(run)


def test_metrics_server_with_busy_or_invalid_port_warns(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        monkeypatch.setenv("DRAWBAR_METRICS_PORT", str(port))
        assert f"not served (DRAWBAR_METRICS_PORT={port})" in server.add(make_run("a"))
    for value in ("x", "99999"):
        monkeypatch.setenv("DRAWBAR_METRICS_PORT", value)
        assert "Metrics are not served" in server.add(make_run("a"))
    assert server.port is None


def test_metrics_of_run_with_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAWBAR_METRICS_PORT", "0")

    def train_function(config: dict[str, Any]) -> None:
        from drawbar.train._driver.metrics_server import SERVER

        checkpoint = train.get_checkpoint()
        with train.checkpoint_dir() as path:
            (path / "state").write_text("0123456789")
            train.report({"loss": 1.0}, checkpoint=path)
        if checkpoint is None:
            raise ValueError("first attempt")
        url = f"http://127.0.0.1:{SERVER.port}/metrics"
        with urllib.request.urlopen(url, timeout=300) as response:
            Path(config["output"]).write_bytes(response.read())

    fit(train_function, tmp_path, {"output": str(tmp_path / "metrics.txt")}, max_failures=1)
    text = (tmp_path / "metrics.txt").read_text()
    assert parse(text, "drawbar_run_state")[("running",)] == 1
    assert sum(parse(text, "drawbar_run_state").values()) == 1
    assert parse(text, "drawbar_attempts_total") == {(): 2}
    restarts = parse(text, "drawbar_restarts_total")
    assert restarts[("worker",)] == 1
    assert sum(restarts.values()) == 1
    assert parse(text, "drawbar_reports_total") == {(): 2}
    assert parse(text, "drawbar_checkpoints_total") == {(): 2}
    assert parse(text, "drawbar_checkpoint_bytes") == {(): 10}
    assert parse(text, "drawbar_live_ranks") == {(): 1}
    assert 0 <= parse(text, "drawbar_last_report_age_seconds")[()] < 600
    assert parse(text, "ray_train_controller_state")[("RUNNING",)] == 1
    unmeasured = {name for name in METRICS if "gpu" in name or "disk" in name}
    unmeasured |= {"drawbar_cpu_percent", "drawbar_memory_bytes", "drawbar_progress_ratio"}
    missing = {name for name in METRICS if name not in text} - unmeasured
    assert missing == set()


def test_run_with_busy_metrics_port_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        monkeypatch.setenv("DRAWBAR_METRICS_PORT", str(busy.getsockname()[1]))
        assert fit(lambda: None, tmp_path).error is None
    output = capfd.readouterr()
    assert "Metrics are not served" in output.out + output.err


def test_metrics_disappear_after_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drawbar.train._driver.metrics_server import SERVER

    monkeypatch.setenv("DRAWBAR_METRICS_PORT", "0")

    def train_function() -> None:
        raise ValueError(time.time())

    with pytest.raises(TrainingFailedError):
        fit(train_function, tmp_path)
    assert SERVER.port is None
