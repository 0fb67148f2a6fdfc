"""Tests of `drawbar stop` for runs in other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig
from tests.cli.conftest import Command


def train_until_stopped() -> None:
    while not train.should_checkpoint():
        train.report({"loss": 0.5})
    with train.checkpoint_dir() as path:
        (path / "model").write_text("weights")
        train.report({"loss": 0.5}, checkpoint=path)


def test_stop_ends_run_after_next_checkpoint(cli: Command, tmp_path: Path) -> None:
    run = DataParallelTrainer(
        train_until_stopped,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path),
    ).start()
    command = [sys.executable, "-m", "drawbar.cli", "stop", run.path, "--json"]
    assert json.loads(subprocess.check_output(command, text=True))["path"] == run.path
    result = run.wait()
    assert result.checkpoint is not None
    assert cli("show", run.path).out.startswith("run  stopped\n")
    refused = cli("stacks", run.path)
    assert (refused.code, "'run' has ended (stopped)" in refused.err) == (2, True)


def test_stop_of_ended_run_reports_status_without_ray(
    cli: Command,
    interrupted_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # without a default storage
    monkeypatch.chdir(interrupted_run.parent)
    assert json.loads(cli("stop", "short", "--json").out)["status"] == "finished"
    for name in ("long", interrupted_run):
        result = cli("stop", name)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert "and its host process died" in result.err
        assert "detached runs" not in result.err


@pytest.mark.usefixtures("ray_cluster")
def test_stop_of_unknown_name_suggests_nearest_name(cli: Command, storage: Path) -> None:
    for command in ("stop", "stacks"):
        result = cli(command, storage / "shart")
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert result.err.endswith("Similar names: short.\n")
