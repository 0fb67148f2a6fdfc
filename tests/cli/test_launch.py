"""Tests of the options of `drawbar launch`, without starting a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.py"], "No script nowhere.py in"),
        (["--num-workers", "2", "--nnodes", "2", "a.py"], "--num-workers cannot be combined with"),
        (["--address", "a", "--standalone", "-m", "no.such"], "No module no.such in"),
        (["--address", "a", "--standalone", "-m", "json.nosuch"], "No module json.nosuch in"),
        (["--address", "a", "--standalone", "/tmp"], "/tmp is a directory. Pass a script in it"),
        (["/nowhere.py"], "No script /nowhere.py."),
        (
            ["--address", "a", "--standalone", "--num-workers", "0", "{script}"],
            "--num-workers must be N or MIN:MAX",
        ),
        (["--env", "NAME", "{script}"], "--env must be NAME=VALUE"),
        (["--resume", "perhaps", "{script}"], "RunConfig.resume"),
        (["--num-workers", "64", "{script}"], "64"),
        (
            ["--nproc-per-node", "100000000000", "{script}"],
            "100000000000 workers of CPU=1 cannot fit with placement_strategy='STRICT_PACK': "
            "at most 8 fit on one node",
        ),
    ],
)
def test_launch_with_invalid_arguments_prints_one_line(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    cli: Command,
    ray_cluster: None,
) -> None:
    script = tmp_path / "script.py"
    script.touch()
    output = cli("launch", *(argument.format(script=script) for argument in arguments))
    assert (output.code, output.out) == (2, "")
    assert expected in output.err
    assert output.err.count("\n") == 1
