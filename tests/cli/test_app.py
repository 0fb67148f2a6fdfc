"""The command as it is called: help, version, and what it says to bad input."""

from __future__ import annotations

import subprocess
import sys

import pytest

from drawbar.cli import main


def test_it_is_a_module_too() -> None:
    command = [sys.executable, "-m", "drawbar.cli", "--version"]
    assert subprocess.check_output(command, text=True).startswith("drawbar 0.")


def test_an_unknown_run_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["stop", "/nowhere/at_all"])
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "/nowhere/at_all" in told.err
