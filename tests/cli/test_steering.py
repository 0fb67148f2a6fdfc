"""`drawbar stop` reaches a run that goes on in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig
from tests.cli.conftest import Command


def until_asked() -> None:
    while not train.should_checkpoint():
        train.report({"loss": 0.5})
    with train.checkpoint_dir() as path:
        (path / "model").write_text("weights")
        train.report({"loss": 0.5}, checkpoint=path)


def test_a_run_is_stopped_after_its_checkpoint(drawbar: Command, tmp_path: Path) -> None:
    run = DataParallelTrainer(
        until_asked,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path),
    ).start()
    command = [sys.executable, "-m", "drawbar.cli", "stop", run.path, "--json"]
    assert json.loads(subprocess.check_output(command, text=True))["path"] == run.path
    result = run.wait()
    assert result.checkpoint is not None
    assert drawbar("show", run.path).out.startswith("run  stopped\n")
    refused = drawbar("stacks", run.path)
    assert (refused.code, "is over (stopped)" in refused.err) == (2, True)


def test_a_run_that_does_not_go_on_is_found_as_show_finds_it_and_no_ray_is_asked(
    drawbar: Command,
    interrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # without a default storage
    monkeypatch.chdir(interrupted.parent)
    assert json.loads(drawbar("stop", "short", "--json").out)["status"] == "finished"
    for name in ("long", interrupted):
        cut_off = drawbar("stop", name)
        assert (cut_off.code, cut_off.out, cut_off.err.count("\n")) == (2, "", 1)
        assert "and its host process died" in cut_off.err
        assert "detached runs" not in cut_off.err


@pytest.mark.usefixtures("ray_cluster")
def test_a_name_that_nothing_has_is_told_with_the_nearest(drawbar: Command, storage: Path) -> None:
    for command in ("stop", "stacks"):
        told = drawbar(command, storage / "shart")
        assert (told.code, told.err.count("\n")) == (2, 1)
        assert told.err.endswith("Similar names: short.\n")
