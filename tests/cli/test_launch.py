"""Tests of the options of `drawbar launch`, without starting a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Command


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.py"], "No script nowhere.py in"),
        (
            ["--address", "a", "--nnodes", "2", "--node_rank", "1", "{script}"],
            "--node-rank 1 would start the run again",
        ),
        (["--module", "--no-python", "json.tool"], "--no-python cannot be combined with --module"),
        (["--no-python", "nothing"], "No program nothing in"),
        (["--nproc-per-node", "unknown", "{script}"], "must be N, cpu, auto, or a device type"),
        (["--print-completion", "tcsh"], "must be one of bash, zsh, fish, pwsh; found 'tcsh'"),
        (["--num-workers", "2", "--nnodes", "2", "a.py"], "--num-workers cannot be combined with"),
        (["--address", "a", "--standalone", "-m", "no.such"], "No module no.such in"),
        (["--address", "a", "--standalone", "-m", "json.nosuch"], "No module json.nosuch in"),
        (["--address", "a", "--standalone", "/tmp"], "/tmp is a directory. Pass a script in it"),
        (["/nowhere.py"], "No script /nowhere.py."),
        (
            ["--address", "a", "--standalone", "--num-workers", "0", "{script}"],
            "--num-workers must be N or MIN:MAX",
        ),
        (["--max-time", "0", "{script}"], "--max-time must be positive and finite, found 0.0\n"),
        (["--stop-before", "soon", "{script}"], "--stop-before must be a number of seconds or a"),
        (["--stop-before", "2020-01-01", "{script}"], "--stop-before 2020-01-01 00:00:00 is in"),
        (["--env", "NAME", "{script}"], "--env must be NAME=VALUE"),
        (["--resume", "perhaps", "{script}"], "--resume must be one of"),
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


def test_launch_print_completion_completes_options_of_torchrun(cli: Command) -> None:
    printed = cli("launch", "--print-completion", "bash")
    assert printed.code == 0
    assert "complete -o default -F _drawbar_completion drawbar" in printed.out
    assert "#compdef drawbar" in cli("launch", "--print-completion=zsh").out
    # As the printed function runs the command.
    variables = {"COMP_WORDS": "drawbar launch --log-", "COMP_CWORD": "2"}
    completed = subprocess.run(
        [sys.executable, "-c", "from drawbar.cli import main; main()"],
        env={**os.environ, "_DRAWBAR_COMPLETE": "complete_bash", **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert completed.stdout.split() == ["--log-dir", "--log-line-prefix-template"]
