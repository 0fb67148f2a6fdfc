"""MLflow and Trackio: their stores have each report of a killed run once.

The runs are killed twice. Each report that counts must be there once. Reports that a restart
replaced may be there, too, but before the later ones and only once.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.trackers.killed_runs import LOSS, NAN, ODD, list_losses, run_killed_twice

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages warn about their dependencies


def check_points(points: list[tuple[int, float]], path: Path) -> None:
    """Check the points of a metric, in the order of their times."""
    assert len(points) == len(set(points))
    assert sorted(dict(points).items()) == list_losses(path)


def test_mlflow_of_killed_run_has_each_report_once(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    from drawbar.trackers._mlflow import make_metric_name

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    path = run_killed_twice(tmp_path, "MLflow", tracking_uri=uri, experiment="digits")
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    history = {
        name: client.get_metric_history(run.info.run_id, make_metric_name(name))
        for name in (LOSS, NAN, ODD)
    }
    points = sorted(history[LOSS], key=lambda metric: (metric.timestamp, metric.step))
    check_points([(metric.step, metric.value) for metric in points], path)
    assert {metric.step for metric in history[ODD]} == set(range(30))
    assert all(math.isnan(metric.value) for metric in history[NAN])


def test_mlflow_metric_names_are_valid_and_different() -> None:
    from drawbar.trackers._mlflow import make_metric_name

    names = [
        "loss",
        "a/b",
        "a b",
        "a%b",
        "a\nb",
        "a\u2028b",
        "a//b",
        "/a",
        "..",
        "a/../b",
        "x" * 300,
    ]
    mapped = [make_metric_name(name) for name in names]
    assert mapped[:3] == names[:3]
    assert len(set(mapped)) == len(names)
    validation = pytest.importorskip("mlflow.utils.validation", reason="needs mlflow")
    for name in mapped:
        validation._validate_metric_name(name)


def test_trackio_of_killed_run_has_each_report_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    storage = pytest.importorskip("trackio.sqlite_storage", reason="needs trackio").SQLiteStorage
    path = run_killed_twice(tmp_path, "Trackio", project="digits")
    (run,) = storage.get_run_records("digits")
    assert run["name"] == "run"
    rows = sorted(storage.get_logs("digits", "run"), key=lambda row: row["timestamp"])
    check_points([(row["step"], row[LOSS]) for row in rows], path)
    assert {row["step"] for row in rows if row[ODD] == row["step"]} == set(range(30))
