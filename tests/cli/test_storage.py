"""Tests of the default storage path, of suggestions for mistyped runs, and of `drawbar delete`."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, RunInProgressError, ScalingConfig
from drawbar.train.runs import (
    ReportFeed,
    RunCatalog,
    find_run,
    get_default_storage_path,
    list_runs,
)
from tests.cli.conftest import Command, make_run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home directory without a configuration file."""
    monkeypatch.delenv("DRAWBAR_STORAGE", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "home"


def write_config(home: Path, text: str) -> Path:
    file = home / ".config" / "drawbar" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


def train_func() -> None:
    train.report({"loss": 1.0})


@pytest.mark.parametrize("kind", ["variable with URI", "file"])
def test_default_storage_path_is_used_by_runs_and_found_by_all_commands(
    kind: str, cli: Command, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = f"memory://{uuid.uuid4().hex}" if kind.endswith("URI") else str(tmp_path / "team")
    if kind == "file":
        write_config(home, f'storage_path = "{storage}"\n')
    else:
        write_config(home, 'storage_path = "/nowhere"\n')
        monkeypatch.setenv("DRAWBAR_STORAGE", storage)
    assert get_default_storage_path() == storage
    assert cli("runs").out == f"No runs in {storage}.\n"
    catalog = RunCatalog()
    assert (catalog.list_runs(), catalog.errors) == ([], [])
    result = DataParallelTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="exp/first"),
    ).fit()
    assert result.uri == f"{storage}/exp/first"
    (listed,) = json.loads(cli("runs", "--json").out)
    assert listed["name"] == "exp/first"
    for command in ("show", "logs", "verify", "export", "plot"):
        assert cli(command, "exp/first").code == 0
    assert cli("clean").code == cli("clean", "exp/first").code == 0
    assert ReportFeed("exp/first").read()
    (record,) = catalog.list_runs()
    assert [run.path for run in list_runs()] == [record.path] == [find_run("exp/first").path]
    assert cli("delete", "exp/first", "--yes").out.startswith("Deleted 'first'")
    assert list(list_runs()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('storage_path = "runs"', "must be an absolute path or a URI, found 'runs'"),
        ("storage_path = 3", "must be an absolute path or a URI, found 3"),
        ('storage = "/runs"', "unknown setting 'storage': did you mean 'storage_path'?"),
        ("storage_path", "is not a valid TOML file"),
    ],
)
def test_invalid_config_file_is_an_error(cli: Command, home: Path, text: str, message: str) -> None:
    file = write_config(home, text)
    result = cli("runs")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert str(file) in result.err
    assert message in result.err
    with pytest.raises(ValueError, match=r"config\.toml"):
        DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=0)).fit()


def test_relative_default_storage_path_is_an_error(
    cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAWBAR_STORAGE", "runs")
    assert "The environment variable DRAWBAR_STORAGE must be an absolute" in cli("runs").err


@pytest.mark.parametrize(
    ("typed", "suggestion"),
    [
        ("nihgt", "night-2026-01-01"),
        ("NIGHT", "night-2026-01-01"),
        ("exp/frist", "exp/first"),
        ("fist", "exp/first"),
    ],
)
def test_mistyped_run_names_similar_runs(
    typed: str, suggestion: str, cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAWBAR_STORAGE", str(tmp_path / "team"))
    monkeypatch.chdir(tmp_path)
    for name in ("night-2026-01-01", "exp/first"):
        (tmp_path / "team" / name).mkdir(parents=True)
        (tmp_path / "team" / name / "journal.jsonl").touch()
    (tmp_path / "team" / f"{typed}-data").mkdir()  # similar, but not a run
    for command in ("show", "delete", "clean"):
        result = cli(command, typed)
        assert result.code == 2
        assert f"Similar names: {suggestion}." in result.err


def test_delete_removes_run_and_keeps_others(cli: Command, storage: Path) -> None:
    (storage / "long" / "notes.txt").write_text("of the user")
    (storage / "long" / "data").symlink_to(storage / "short")
    shown = json.loads(cli("delete", storage / "long", storage / "failed", "--yes", "--json").out)
    assert [run["name"] for run in shown["deleted"]] == ["long", "failed"]
    assert shown["deleted"][0]["bytes"] > 0
    assert os.listdir(storage) == ["short"]
    assert cli("verify", storage / "short").code == 0
    result = cli("delete", storage / "long", "--yes")
    assert (result.code, result.err.count("\n")) == (2, 1)


# Ctrl-C while `input()` waits, which reads the terminal
INTERRUPTED_PROMPT = """
import builtins, signal
builtins.input = lambda prompt: signal.raise_signal(signal.SIGINT)
from drawbar.cli import main
main()
"""


@pytest.mark.parametrize(("reply", "code"), [("y", 0), ("", 1), ("interrupt", 130)])
def test_delete_asks_for_confirmation(storage: Path, reply: str, code: int) -> None:
    terminal, terminal_of_command = pty.openpty()
    command = [sys.executable, "-m", "drawbar.cli", "delete", str(storage / "long")]
    if reply == "interrupt":
        command[1:3] = ["-c", INTERRUPTED_PROMPT]
    os.write(terminal, f"{reply}\n".encode())
    result = subprocess.run(
        command, stdin=terminal_of_command, capture_output=True, text=True, check=False
    )
    os.close(terminal)
    os.close(terminal_of_command)
    assert f"{storage}/long: finished, " in result.stderr
    assert ", 3 checkpoints\nDelete this run? [y/N]:" in result.stderr
    assert result.returncode == code
    assert (storage / "long").exists() == (code != 0)


def test_delete_without_terminal_requires_yes(
    cli: Command, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert "Pass --yes." in cli("delete", storage / "long").err
    assert (storage / "long").exists()


def test_delete_refuses_active_runs_and_directories_of_other_runs(
    cli: Command, storage: Path, interrupted_run: Path
) -> None:
    with open(interrupted_run / "journal.jsonl", "rb") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        refused = cli("delete", interrupted_run, storage / "short", "--yes")
    assert (refused.code, refused.out[:15]) == (2, "Deleted 'short'")
    assert "Run 'long' is running. Stop it first" in refused.err
    make_run(storage, "failed/nested", 1)
    assert "contains the run 'failed/nested'" in cli("delete", storage / "failed", "--yes").err
    (storage / "link").symlink_to(interrupted_run)
    assert "is a symbolic link" in cli("delete", storage / "link", "--yes").err
    assert sorted(os.listdir(storage)) == ["failed", "link", "long"]
    assert cli("delete", interrupted_run, "--yes").code == 0


def test_delete_of_unfinished_run_in_object_store_needs_force(
    cli: Command, interrupted_run: Path
) -> None:
    import fsspec

    address = f"memory://{uuid.uuid4().hex}"
    fsspec.filesystem("memory").put(f"{interrupted_run}/", f"{address}/long/", recursive=True)
    with pytest.raises(RunInProgressError, match="another machine may be running it"):
        find_run(f"{address}/long").delete()
    assert cli("delete", f"{address}/long", "--yes", "--force").code == 0
    assert not fsspec.filesystem("memory").exists(f"{address}/long")
