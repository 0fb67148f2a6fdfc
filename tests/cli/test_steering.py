"""`drawbar stop` reaches a run that goes on in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig
from tests.cli.conftest import Command


def until_asked() -> None:
    while not train.checkpoint_requested():
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
