"""The command as it is called: its start, its help, and what it says to bad input."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from drawbar.cli._app import app
from tests.cli.conftest import Command

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
COMMANDS = sorted(each.callback.__name__ for each in app.registered_commands if each.callback)


def test_it_is_a_module_too() -> None:
    command = [sys.executable, "-m", "drawbar.cli", "--version"]
    assert subprocess.check_output(command, text=True).startswith("drawbar 0.")
    closed = f"{shlex.join(command)} >&-"
    assert subprocess.check_output(closed, shell=True, stderr=subprocess.STDOUT) == b""


def test_runs_imports_neither_ray_nor_what_draws(runs_made: Path) -> None:
    code = (
        "import sys, drawbar.cli\n"
        f"try: drawbar.cli.main(['runs', {str(runs_made)!r}])\n"
        "finally: print(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    heavy = {"asyncio", "ray", "numpy", "pandas", "pyarrow", "matplotlib", "rich.console", "libcst"}
    assert not heavy & set(loaded)
    assert "long" in loaded


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_shown_in_the_docs_and_fits_a_screen(
    command: str, drawbar: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = drawbar(command, "--help").out.strip()
    found = re.search(rf"^\$ drawbar {command} --help\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert found is not None
    assert found[1].strip() == shown
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("\n") < 50


def test_completion_knows_the_commands() -> None:
    asked = {"_DRAWBAR_COMPLETE": "complete_bash", "COMP_WORDS": "drawbar sh", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "from drawbar.cli import main; main()"]
    told = subprocess.check_output(command, env={**os.environ, **asked}, text=True)
    assert told.split() == ["show"]


@pytest.mark.parametrize("command", ["show", "logs", "verify", "export", "plot"])
def test_an_unknown_run_is_one_line_and_exit_code_2(drawbar: Command, command: str) -> None:
    told = drawbar(command, "/nowhere/at_all")
    assert (told.code, told.out) == (2, "")
    assert (
        told.err
        == "drawbar: There is no run 'at_all' in /nowhere. It is empty or does not exist.\n"
    )


def test_a_storage_without_permission_is_one_line(drawbar: Command, storage: Path) -> None:
    storage.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        told = drawbar("runs", storage)
    finally:
        os.seteuid(user)
        storage.chmod(0o700)
    assert (told.code, told.err.count("\n")) == (2, 1)
    assert "Permission denied" in told.err


@pytest.mark.parametrize("storage", ["abc://there", "/nowhere", __file__])
def test_what_is_no_storage_is_one_line(drawbar: Command, storage: str) -> None:
    told = drawbar("runs", storage)
    assert (told.code, told.err.count("\n")) == (2, 1)
