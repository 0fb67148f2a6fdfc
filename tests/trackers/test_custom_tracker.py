"""Trackers that users write: subclasses of `Tracker` and `Connection`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.trackers import Connection, Cursor, Point, TrackedRun, Tracker
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig

NAME = "drawbar.trackers"


class Lines(Tracker):
    """Tracker that appends each point to a file."""

    kind = "lines"

    def __init__(self, file: Path, **options: Any) -> None:
        super().__init__(**options)
        self.file = file

    def get_options(self) -> dict[str, str | None]:
        return {"file": str(self.file)}

    def connect(self, run: TrackedRun, cursor: Cursor) -> Connection:
        return LinesConnection(self.file, run, cursor)


class LinesConnection(Connection):
    def __init__(self, file: Path, run: TrackedRun, cursor: Cursor) -> None:
        super().__init__(cursor if file.exists() else Cursor())
        self.file, self.name = file, run.name

    def write(self, points: Sequence[Point]) -> None:
        with self.file.open("a") as file:
            file.writelines(f"{self.name} {point.index} {point.values}\n" for point in points)

    def flush(self) -> bool:
        return True

    def close(self, outcome: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{outcome}\n")


def train_func() -> None:
    for index in range(2):
        train.report({"loss": index})


def fit(storage: Path, *trackers: Tracker) -> None:
    DataParallelTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=storage, callbacks=list(trackers)),
    ).fit()


def test_custom_tracker_receives_each_report_once(tmp_path: Path) -> None:
    tracker = Lines(tmp_path / "lines")
    fit(tmp_path, tracker)
    expected = ["run 0 {'loss': 0.0}", "run 1 {'loss': 1.0}", "finished"]
    assert tracker.file.read_text().splitlines() == expected
    assert tracker.send(str(tmp_path / "run")) == 0
    tracker.file.unlink()
    assert tracker.send(str(tmp_path / "run")) == 2
    assert tracker.file.read_text().splitlines() == expected
    (state,) = (tmp_path / "run" / "trackers").glob("lines-*.json")
    assert json.loads(state.read_text())["end"] == 2


def test_custom_tracker_failure_names_the_call_that_sends_missing_reports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, Lines(tmp_path / "missing" / "lines"))
    (warning,) = [record.getMessage() for record in caplog.records if record.name == NAME]
    assert f"Lines(file='{tmp_path}/missing/lines').send('{tmp_path}/run')" in warning
    assert "drawbar track" not in warning


def test_custom_trackers_with_same_destination_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two trackers with the same destination"):
        fit(tmp_path, Lines(tmp_path / "lines"), Lines(tmp_path / "lines"))


def test_incomplete_tracker_class_raises(tmp_path: Path) -> None:
    class WithoutPackage(Lines):
        kind = "x"
        package = "no_such_package"

    with pytest.raises(ModuleNotFoundError, match="needs the package 'no_such_package'"):
        WithoutPackage(tmp_path)
    with pytest.raises(TypeError, match="abstract"):
        Tracker()  # type: ignore[abstract]
