"""Tests of the `drawbar` command: startup, help texts, and errors in arguments."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Command

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
TYPER_VERSION = tuple(map(int, importlib.metadata.version("typer").split(".")[:2]))
COMMANDS = re.findall(r"^\$ drawbar (\w+) --help$", PAGE.read_text(), re.M)


def test_main_as_module_prints_version() -> None:
    command = [sys.executable, "-m", "drawbar.cli", "--version"]
    assert subprocess.check_output(command, text=True).startswith("drawbar 0.")
    closed = f"{shlex.join(command)} >&-"
    assert subprocess.check_output(closed, shell=True, stderr=subprocess.STDOUT) == b""


@pytest.mark.parametrize("stderr", [subprocess.PIPE, subprocess.STDOUT])
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "arguments",
    [pytest.param(("runs",), marks=pytest.mark.nightly), ("show", "long"), ("show", "nosuch")],
)
def test_command_whose_reader_has_ended_prints_nothing(
    arguments: tuple[str, ...], unbuffered: str, stderr: int, shared_storage: Path
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "drawbar.cli", *arguments],
            env={
                **os.environ,
                "DRAWBAR_STORAGE": str(shared_storage),
                "PYTHONUNBUFFERED": unbuffered,
            },
            stdout=stdout,
            stderr=stderr,
        )
    is_error = "nosuch" in arguments and stderr == subprocess.PIPE
    assert done.returncode == (2 if is_error else 141)
    assert bool(done.stderr) == is_error


def test_runs_imports_neither_ray_nor_plotting(shared_storage: Path) -> None:
    code = (
        "import sys, drawbar.cli\n"
        f"try: drawbar.cli.main(['runs', {str(shared_storage)!r}])\n"
        "finally: print(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    heavy = {"asyncio", "ray", "numpy", "pandas", "pyarrow", "matplotlib", "rich.console", "libcst"}
    assert not heavy & set(loaded)
    assert "long" in loaded


def test_help_lists_the_commands_of_the_docs_page(cli: Command) -> None:
    commands = cli("--help").out.partition("Commands:\n")[2]
    assert sorted(re.findall(r"^  (\w+)", commands, re.M)) == sorted(COMMANDS)


@pytest.mark.skipif(TYPER_VERSION < (0, 29), reason="older versions of Typer format it differently")
@pytest.mark.parametrize("command", COMMANDS)
def test_help_equals_docs_page_and_fits_80_columns(
    command: str, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli(command, "--help").out.strip()
    match = re.search(rf"^\$ drawbar {command} --help\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert match is not None
    assert match[1].strip() == shown
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("\n") < 60


def test_completion_suggests_commands() -> None:
    variables = {
        "_DRAWBAR_COMPLETE": "complete_bash",
        "COMP_WORDS": "drawbar sh",
        "COMP_CWORD": "1",
    }
    command = [sys.executable, "-c", "from drawbar.cli import main; main()"]
    result = subprocess.check_output(command, env={**os.environ, **variables}, text=True)
    assert result.split() == ["show"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["migrate", "--wirte", "x.py"], "[^:]+option:? '?--wirte"),
        (["migrate"], "Missing argument 'PATH'"),
        (["shwo"], "No such command 'shwo'"),
        (["list"], "[^']+'list'. Did you mean 'runs'?"),
        (["status", "x"], "[^']+'status'. Did you mean 'show'?"),
        (["plot", "run", "--attempt", "x"], "[^:]+option:? '?--attempt"),
        (["clean", "--older-than", "-1"], "Invalid value for '--older-than'"),
        (["launch"], "Missing argument 'SCRIPT'"),
    ],
)
def test_invalid_arguments_print_one_line_and_exit_with_2(
    cli: Command, arguments: list[str], message: str
) -> None:
    result = cli(*arguments)
    assert (result.code, result.out) == (2, "")
    is_unknown = arguments[0] in ("shwo", "list", "status")
    command = "drawbar" if is_unknown else f"drawbar {arguments[0]}"
    assert re.match(f"drawbar: error: {message}", result.err)
    assert result.err.endswith(f" For the arguments, run: {command} --help\n")
    assert result.err.count("\n") == 1


def test_command_without_arguments_prints_help(cli: Command) -> None:
    assert "Commands:" in cli().out


@pytest.mark.parametrize("command", ["show", "logs", "verify", "export", "plot"])
def test_unknown_run_prints_one_line_and_exits_with_2(cli: Command, command: str) -> None:
    result = cli(command, "/nowhere/at_all")
    assert (result.code, result.out) == (2, "")
    message = "There is no run 'at_all' in /nowhere. This storage path is empty or does not exist."
    assert result.err == f"drawbar: error: {message}\n"


def test_full_traceback_is_printed_on_request(
    cli: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAWBAR_FULL_TRACEBACK", "1")
    lines = cli("show", tmp_path / "missing").err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("drawbar: error: ")


def test_runs_of_unreadable_storage_prints_one_line(cli: Command, storage: Path) -> None:
    storage.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        result = cli("runs", storage)
    finally:
        os.seteuid(user)
        storage.chmod(0o700)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "Permission denied" in result.err


@pytest.mark.parametrize("storage", ["abc://there", "/nowhere", __file__])
def test_runs_of_invalid_storage_prints_one_line(cli: Command, storage: str) -> None:
    result = cli("runs", storage)
    assert (result.code, result.err.count("\n")) == (2, 1)
