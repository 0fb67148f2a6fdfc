"""TensorBoard: the event files of a run have each report once."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drawbar.trackers import TensorBoard
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig, get_context, report
from drawbar.train.runs import find_run
from tests.trackers.event_files import Points, read_points
from tests.trackers.killed_runs import LOSS, NAN, ODD, list_losses, run_killed_twice
from tests.train.runs import fit


def read_with_tensorboard(log_dir: Path) -> Points:
    """Read the scalars as TensorBoard does."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    ).EventAccumulator(str(log_dir), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_killed_twice(tmp_path_factory.mktemp("storage"), "TensorBoard")


@pytest.mark.parametrize("read", [read_points, read_with_tensorboard])
def test_tensorboard_of_killed_run_has_each_report_once(
    killed_run: Path, read: Callable[[Path], Points]
) -> None:
    points = read(killed_run / "tensorboard")
    losses = list_losses(killed_run)
    assert [(index, round(loss, 3)) for index, loss in points[LOSS]] == losses
    assert points[ODD] == [(index, index) for index in range(len(losses))]
    assert all(math.isnan(value) for _, value in points[NAN])
    assert len(points[NAN]) == len(losses) == 30


def report_losses(config: dict[str, int]) -> None:
    for index in range(config["count"]):
        report({"loss": float(index)})


def test_tensorboard_send_sends_each_report_once(tmp_path: Path) -> None:
    path = Path(fit(report_losses, tmp_path, {"count": 5}).path)
    tracker = TensorBoard(tmp_path / "tb")
    assert [tracker.send(str(path)) for _ in range(2)] == [5, 0]
    assert read_points(tmp_path / "tb" / "run")["loss"] == list_losses(path)


def test_tensorboard_send_from_start_writes_deleted_files_again(tmp_path: Path) -> None:
    path = Path(fit(report_losses, tmp_path, {"count": 3}).path)
    tracker = TensorBoard()
    tracker.send(str(path))
    for file in (path / "tensorboard").iterdir():
        file.unlink()
    assert tracker.send(str(path), from_start=True) == 3
    assert read_points(path / "tensorboard")["loss"] == list_losses(path)


def test_tensorboard_trackers_with_different_directories_both_receive_reports(
    tmp_path: Path,
) -> None:
    trackers = [TensorBoard(tmp_path / "a"), TensorBoard(tmp_path / "b", ranks="mean")]
    path = Path(fit(report_losses, tmp_path, {"count": 4}, callbacks=trackers).path)
    assert read_points(tmp_path / "a" / "run")["loss"] == list_losses(path)
    assert read_points(tmp_path / "b" / "run")["loss"] == list_losses(path)


def report_rank() -> None:
    for index in range(3):
        report({"loss": float(index + 10 * get_context().get_world_rank())})


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings("ignore:RunConfig.detached=True has no effect")  # but it is used
def test_tensorboard_of_detached_run_has_mean_of_all_ranks(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path / "tb", ranks="mean")
    DataParallelTrainer(
        report_rank,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=tmp_path, callbacks=[tracker], detached=True),
    ).fit()
    assert read_points(tmp_path / "tb" / "run")["loss"] == [(0, 5), (1, 6), (2, 7)]


def test_tensorboard_trackers_with_same_directory_raise_before_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="same destination"):
        RunConfig(storage_path=tmp_path, callbacks=[TensorBoard(), TensorBoard()])
    tracker = TensorBoard()
    with pytest.raises(ValueError, match="same destination"):
        RunConfig(storage_path=tmp_path, callbacks=[tracker, tracker])


def test_tensorboard_on_remote_storage_requires_log_dir(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Set TensorBoard\(log_dir=...\)"):
        RunConfig(storage_path="s3://bucket/runs", callbacks=[TensorBoard()])
    RunConfig(storage_path="s3://bucket/runs", callbacks=[TensorBoard(tmp_path)])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ranks": -1}, "ranks=-1 must be"),
        ({"ranks": "median"}, "ranks='median' must be"),
        ({"finish_timeout": 0}, "finish_timeout must be positive"),
        ({"log_dir": "s3://bucket/tb"}, "is a URI"),
    ],
)
def test_tensorboard_invalid_argument_raises(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        TensorBoard(**options)


def test_tensorboard_failure_warns_once_and_send_delivers_reports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_dir = tmp_path / "tb dir"
    log_dir.write_text("a file, not a directory")
    tracker = TensorBoard(log_dir)
    path = Path(fit(report_losses, tmp_path, {"count": 4}, callbacks=[tracker]).path)
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "drawbar.trackers"]
    assert f"drawbar track {path} --to tensorboard --log-dir '{log_dir}'" in warning
    assert find_run(path).status == "finished"
    log_dir.unlink()
    assert tracker.send(str(path)) == 4
    assert read_points(log_dir / "run")["loss"] == list_losses(path)


def test_tensorboard_of_two_active_runs_receives_reports_of_both(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path / "tb")
    storage = [tmp_path / "first", tmp_path / "second"]

    def report_during_other_run(config: dict[str, int]) -> None:
        report_losses({"count": 2})
        inner = RunConfig(name="inner", storage_path=storage[1], callbacks=[tracker])
        fit(report_losses, inner, {"count": 3})
        report_losses({"count": 2})

    outer = RunConfig(name="outer", storage_path=storage[0], callbacks=[tracker])
    fit(report_during_other_run, outer, {})
    losses = {name: read_points(tmp_path / "tb" / name)["loss"] for name in ("outer", "inner")}
    assert losses["inner"] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert losses["outer"] == [(0, 0.0), (1, 1.0), (2, 0.0), (3, 1.0)]


def test_tensorboard_directory_of_another_run_with_same_name_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = TensorBoard(tmp_path / "tb")
    first = Path(fit(report_losses, tmp_path / "a", {"count": 4}, callbacks=[tracker]).path)
    second = Path(fit(report_losses, tmp_path / "b", {"count": 2}, callbacks=[tracker]).path)
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "drawbar.trackers"]
    assert f"{tmp_path / 'tb' / 'run'} has the event files of another run named 'run'" in warning
    assert find_run(second).status == "finished"
    assert read_points(tmp_path / "tb" / "run")["loss"] == list_losses(first)
    with pytest.raises(ValueError, match="Set another name or log_dir"):
        tracker.send(str(second))


def report_and_track(config: dict[str, str]) -> None:
    report({"loss": 1.0})
    path = Path(config["path"])
    while not list((path / "trackers").glob("*.json")):  # the tracker has stored the report
        time.sleep(0.01)
    command = [sys.executable, "-m", "drawbar.cli", "track", str(path), "--to", "tensorboard"]
    tracked = subprocess.run(command, capture_output=True, text=True)
    assert tracked.returncode != 0
    assert "another process sends the reports" in tracked.stderr


def test_tensorboard_of_active_run_refuses_drawbar_track(tmp_path: Path) -> None:
    config = {"path": str(tmp_path / "run")}
    path = Path(fit(report_and_track, tmp_path, config, callbacks=[TensorBoard()]).path)
    assert read_points(path / "tensorboard")["loss"] == [(0, 1.0)]
    assert TensorBoard().send(str(path)) == 0
