"""MLflow, W&B, and Trackio: their stores have each report of a killed run once.

The runs are killed twice. Each report that counts must be there once. Reports that a restart
replaced may be there, too, but before the later ones and only once.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from drawbar import trackers
from drawbar.train import runs
from tests.trackers.killed_runs import LOSS, NAN, ODD, list_losses, run_killed_twice

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages warn about their dependencies


def check_points(points: list[tuple[int, float]], path: Path) -> None:
    """Check the points of a metric, in the order of their times."""
    assert len(points) == len(set(points))
    assert sorted(dict(points).items()) == list_losses(path)


def read_run_id(path: Path) -> str:
    with contextlib.closing(runs.ReportFeed(path)) as feed:
        feed.read(limit=1)
        return feed.run_id


def test_mlflow_of_killed_run_has_each_report_once(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    path = run_killed_twice(tmp_path, "MLflow", tracking_uri=uri, experiment="digits")
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    (odd,) = run.data.metrics.keys() - {LOSS, NAN}  # MLflow does not allow the name
    history = {name: client.get_metric_history(run.info.run_id, name) for name in (LOSS, NAN, odd)}
    points = sorted(history[LOSS], key=lambda metric: (metric.timestamp, metric.step))
    check_points([(metric.step, metric.value) for metric in points], path)
    assert {metric.step for metric in history[odd]} == set(range(30))
    assert all(math.isnan(metric.value) for metric in history[NAN])


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


def read_wandb_records(path: Path) -> Iterator[bytes]:
    """Read a file in LevelDB's log format, after W&B's header. The end may be incomplete."""
    data = path.read_bytes()
    header, block = struct.Struct("<IHB"), 32_768
    offset, record = 7, b""
    while True:
        if block - offset % block < header.size:
            offset += block - offset % block  # padding
        if offset + header.size > len(data):
            return
        _, size, kind = header.unpack_from(data, offset)
        offset += header.size + size
        if offset > len(data):
            return
        is_start, is_end = kind in (1, 2), kind in (1, 4)  # 1 is a record in one part
        part = data[offset - size : offset]
        record = part if is_start else record + part
        if is_end:
            yield record


def test_wandb_of_killed_run_has_each_report_once(tmp_path: Path) -> None:
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="needs wandb")
    path = run_killed_twice(tmp_path, "WandB", project="digits", mode="offline")
    run_id = f"drawbar-{read_run_id(path)}"
    files = sorted(path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 3
    assert len(list((path / "wandb").glob("offline-run-*"))) == 3
    decoded = [
        records.Record.FromString(record) for file in files for record in read_wandb_records(file)
    ]
    assert {record.run.run_id for record in decoded if record.HasField("run")} == {run_id}
    rows = [
        {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in decoded
        if record.HasField("history")
    ]
    steps = [row["_step"] for row in rows]
    assert steps == list(range(len(rows)))
    check_points([(row["drawbar/report"], row[LOSS]) for row in rows], path)
    assert all(row[NAN] == "NaN" or math.isnan(row[NAN]) for row in rows)
    assert all(row[ODD] == row["drawbar/report"] for row in rows)


def test_wandb_invalid_mode_raises() -> None:
    pytest.importorskip("wandb", reason="needs wandb")
    with pytest.raises(ValueError, match="mode='local' must be"):
        trackers.WandB(mode="local")  # type: ignore[arg-type]
