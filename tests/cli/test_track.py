"""drawbar track: send the reports of a run to a tracker."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Command


def test_track_sends_each_report_once(cli: Command, shared_storage: Path, tmp_path: Path) -> None:
    command = ("track", shared_storage / "short", "--to", "tensorboard", "--log-dir", tmp_path)
    first, second = (json.loads(cli(*command, "--json").out)["reports"] for _ in range(2))
    assert first > 0
    assert second == 0
    assert list((tmp_path / "short").glob("events.out.tfevents.*"))


def test_track_option_of_another_tracker_is_an_error(cli: Command, shared_storage: Path) -> None:
    command = ("track", shared_storage / "short", "--to", "tensorboard", "--experiment", "a")
    result = cli(*command)
    assert result.code == 2
    assert "--experiment is not an option of --to tensorboard" in result.err
