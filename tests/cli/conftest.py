"""Fixtures: runs that all tests share, and the command line called in this process."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.cli import main
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig, WorkerGroupError


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., CommandResult]


FORWARDED = re.compile(r"(\x1b\[\d+m)?\((raylet|autoscaler|.* pid=\d+)")
"""Lines that Ray prints in this process, at any time, about workers of other tests."""


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Run a command in this process, for example `cli("show", path)`."""
    handlers = {number: signal.getsignal(number) for number in signal.Signals}

    def run_command(*arguments: object) -> CommandResult:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        output = capfd.readouterr()
        err = [line for line in output.err.splitlines(keepends=True) if not FORWARDED.match(line)]
        return CommandResult(int(exit_info.value.code or 0), output.out, "".join(err))

    yield run_command
    for number, handler in handlers.items():  # `drawbar launch` has set some
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


def train_func(config: dict[str, Any]) -> None:
    for epoch in range(config["epochs"]):
        print("epoch", epoch)
        with train.checkpoint_dir() as path:
            (path / "model").write_text("weights")
            train.report({"loss": 1 / (epoch + 1), "val": {"acc": 0.1}}, checkpoint=path)
    if config["fails"]:
        raise ValueError("boom")


def make_run(
    storage: Path | str, name: str, epochs: int, *, fails: bool = False, **config: Any
) -> None:
    DataParallelTrainer(
        train_func,
        train_loop_config={"epochs": epochs, "fails": fails},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name=name, storage_path=storage, **config),
    ).fit()


@pytest.fixture(scope="session")
def shared_storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Storage with the runs `long` (3 epochs), `short` (2), and `failed` (1). Do not change it."""
    storage = tmp_path_factory.mktemp("runs")
    make_run(storage, "long", 3)
    make_run(storage, "short", 2)
    with pytest.raises(WorkerGroupError):
        make_run(storage, "failed", 1, fails=True)
    return storage


@pytest.fixture
def storage(shared_storage: Path, tmp_path: Path) -> Path:
    """Copy of `shared_storage` that a test may change."""
    shutil.copytree(shared_storage, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def interrupted_run(storage: Path) -> Path:
    """Directory of a run whose driver was killed, according to its journal."""
    journal = storage / "long" / "journal.jsonl"
    *lines, _ = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines))
    return storage / "long"
