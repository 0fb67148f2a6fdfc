"""The metrics of runs in progress, as Prometheus reads them."""

from __future__ import annotations

import http.client
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from drawbar import train
from drawbar.train import (
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from tests.train.runs import fit

RUN_LABELS = ("run", "run_id", "ray_train_run_name", "ray_train_run_id")

Values = dict[tuple[str, ...], float]
"""Values of a metric by its labels."""


class WaitingRun:
    """Run in local mode that calls a function and then waits for `finish()`."""

    def __init__(self, storage: Path, name: str, function: Callable[[], None]) -> None:
        started = storage / f"{name}_started"
        release = self._release = storage / f"{name}_release"
        os.mkfifo(started)
        os.mkfifo(release)

        def train_function() -> None:
            function()
            started.write_text("")
            release.read_text()

        trainer = DataParallelTrainer(
            train_function,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(
                name=name, storage_path=storage, failure_config=FailureConfig(max_failures=1)
            ),
        )
        self._run = trainer.start()
        started.read_text()

    def finish(self) -> None:
        self._release.write_text("")
        self._run.wait()


def do_nothing() -> None: ...


def read_port(capfd: pytest.CaptureFixture[str]) -> int:
    """Return the port of the server, which the run has printed."""
    match = re.search(r"metrics: http://127\.0\.0\.1:(\d+)/metrics", "".join(capfd.readouterr()))
    assert match is not None
    return int(match[1])


def scrape(port: int, path: str = "/metrics", host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("GET", path, headers={"Host": host} if host else {})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def parse(text: str, name: str, ignored: tuple[str, ...] = RUN_LABELS) -> Values:
    """Return the values of a metric by its labels, without the ignored ones."""
    return {
        tuple(value for key, value in sample.labels.items() if key not in ignored): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_metrics_server_serves_several_runs_and_stops_after_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAWBAR_METRICS_PORT", "0")

    def list_runs() -> Values:
        return parse(scrape(port)[1], "drawbar_live_ranks", ignored=("run_id",))

    first = WaitingRun(tmp_path, "a", do_nothing)
    port = read_port(capfd)
    assert list_runs() == {("a",): 1}
    second = WaitingRun(tmp_path, "b", do_nothing)
    assert "metrics:" not in "".join(capfd.readouterr())
    assert list_runs() == {("a",): 1, ("b",): 1}
    first.finish()
    assert list_runs() == {("b",): 1}
    second.finish()
    with pytest.raises(ConnectionRefusedError):
        scrape(port)


def test_metrics_server_rejects_other_hosts_and_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAWBAR_METRICS_PORT", "0")
    run = WaitingRun(tmp_path, "a", do_nothing)
    port = read_port(capfd)
    assert scrape(port, host="attacker.example:80")[0] == 403
    assert scrape(port, host="[::1]:9000")[0] == 200
    assert scrape(port, path="/journal.jsonl")[0] == 404
    run.finish()


def test_metrics_of_run_with_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAWBAR_METRICS_PORT", "0")

    def fail_once() -> None:
        checkpoint = train.get_checkpoint()
        with train.checkpoint_dir() as path:
            (path / "state").write_text("0123456789")
            train.report({"loss": 1.0}, checkpoint=path)
        if checkpoint is None:
            raise ValueError("first attempt")

    run = WaitingRun(tmp_path, "a", fail_once)
    status, text = scrape(read_port(capfd))
    run.finish()
    assert status == 200
    assert parse(text, "drawbar_run_status")[("running",)] == 1
    assert sum(parse(text, "drawbar_run_status").values()) == 1
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


@pytest.mark.parametrize("port", ["busy", "x", "99999"])
def test_run_with_busy_or_invalid_metrics_port_warns_and_finishes(
    port: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        if port == "busy":
            port = str(busy.getsockname()[1])
        monkeypatch.setenv("DRAWBAR_METRICS_PORT", port)
        assert fit(lambda: None, tmp_path).error is None
    message = f"Metrics are not served (DRAWBAR_METRICS_PORT={port})"
    assert message in "".join(capfd.readouterr())


def test_metrics_disappear_after_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAWBAR_METRICS_PORT", "0")

    def train_function() -> None:
        raise ValueError("error of the user")

    with pytest.raises(TrainingFailedError):
        fit(train_function, tmp_path)
    with pytest.raises(ConnectionRefusedError):
        scrape(read_port(capfd))
