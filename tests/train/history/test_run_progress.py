"""Progress of a run: percent, ETA, and the journal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drawbar import train
from drawbar.train import runs
from tests.train.runs import fit


def test_run_progress_percent_reaches_100_only_at_the_end() -> None:
    almost = runs.RunProgress(done=10**9 - 1, total=10**9)
    assert str(almost) == "99 %, 999,999,999/1,000,000,000 steps"
    assert almost.percent is not None
    assert almost.percent < 100
    assert runs.RunProgress(done=7, total=5).percent == 100
    assert runs.RunProgress(done=7, total=5).eta_seconds == 0
    assert runs.RunProgress(done=7).percent is None


def test_run_progress_eta_is_remaining_steps_by_rate() -> None:
    progress = runs.RunProgress(done=400, total=1000, rate=12.5)
    assert progress.eta_seconds == 48
    assert str(progress) == "40 %, 400/1,000 steps, 12.5 steps/s, ETA 00:48"
    assert runs.RunProgress(done=400, total=1000).eta_seconds is None


def test_set_progress_with_unprintable_unit_raises(tmp_path: Path) -> None:
    def function() -> None:
        for unit in ("", "  ", "\ud800", "a\nb", "\x1b[31m", "x" * 41):
            message = "unit must have 1 to 40 printable characters"
            with pytest.raises(ValueError, match=message) as raised:
                train.set_progress(1, unit=unit)
            assert str(raised.value).isprintable()

    fit(function, tmp_path)


def test_set_progress_in_finished_and_failed_runs_is_stored(tmp_path: Path) -> None:
    def function() -> None:
        for done, total, error in (
            (-1, None, ValueError),
            (float("nan"), None, ValueError),
            (True, None, TypeError),
            (1, 0, ValueError),
        ):
            with pytest.raises(error):
                train.set_progress(done, total)
        for step in range(1, 5):
            train.set_progress(step, 8, unit="epochs")
        train.report({"loss": 1.0})

    def fail() -> None:
        function()
        raise ValueError("broken")

    fit(function, tmp_path)
    with pytest.raises(train.WorkerGroupError):
        fit(fail, tmp_path, name="failed")
    for name in ("run", "failed"):
        progress = runs.find_run(tmp_path / name).progress
        assert progress is not None
        assert (progress.done, progress.total, progress.unit) == (4, 8, "epochs")
        assert progress.to_dict()["percent"] == 50


def test_progress_of_killed_driver_is_in_journal(tmp_path: Path) -> None:
    script = f"""
import os, signal
from drawbar import train

def function():
    train.set_progress(3, 10)
    with train.checkpoint_dir() as path:
        (path / "model").write_text("x")
        train.set_progress(4, 10)
        train.report({{}}, checkpoint=path)
    os.kill(os.getpid(), signal.SIGKILL)

train.DataParallelTrainer(
    function,
    scaling_config=train.ScalingConfig(num_workers=0),
    run_config=train.RunConfig(name="run", storage_path={str(tmp_path)!r}),
).fit()
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    progress = runs.find_run(tmp_path / "run").progress
    assert progress is not None
    assert progress.done == 4


def test_progress_of_ended_run_has_no_rate(tmp_path: Path) -> None:
    def function() -> None:
        for done in range(3):
            train.set_progress(done, 10)
            train.report({})

    fit(function, tmp_path)
    progress = runs.find_run(tmp_path / "run").progress
    assert progress is not None
    assert (progress.done, progress.rate, progress.eta_seconds) == (2, None, None)


def test_progress_too_large_count_raises(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="finite, found inf"):
        fit(lambda: train.set_progress(10**5000), tmp_path)
