"""Runs that were made once, and the command as tests call it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.cli import main
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig, WorkerGroupError


@dataclass(frozen=True)
class Told:
    """What a command has written, and how it has ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Told]


FORWARDED = re.compile(r"(\x1b\[\d+m)?\((raylet|autoscaler|.* pid=\d+)")
"""What Ray tells in this process, at any time, of what befell other tests' workers."""


@pytest.fixture
def drawbar(capfd: pytest.CaptureFixture[str]) -> Command:
    """`drawbar("show", path)`: the command, in this process."""

    def drawbar(*arguments: object) -> Told:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(each) for each in arguments])
        told = capfd.readouterr()
        err = [line for line in told.err.splitlines(keepends=True) if not FORWARDED.match(line)]
        return Told(int(ended.value.code or 0), told.out, "".join(err))

    return drawbar


def loop(config: dict[str, Any]) -> None:
    for epoch in range(config["epochs"]):
        print("epoch", epoch)
        with train.checkpoint_dir() as path:
            (path / "model").write_text("weights")
            train.report({"loss": 1 / (epoch + 1), "val": {"acc": 0.1}}, checkpoint=path)
    if config["fails"]:
        raise ValueError("boom")


def fit(storage: Path | str, name: str, epochs: int, *, fails: bool = False, **config: Any) -> None:
    DataParallelTrainer(
        loop,
        train_loop_config={"epochs": epochs, "fails": fails},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name=name, storage_path=storage, **config),
    ).fit()


@pytest.fixture(scope="session")
def runs_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storage of `long` (3 epochs), `short` (2) and `failed` (1). Not to be changed."""
    storage = tmp_path_factory.mktemp("runs")
    fit(storage, "long", 3)
    fit(storage, "short", 2)
    with pytest.raises(WorkerGroupError):
        fit(storage, "failed", 1, fails=True)
    return storage


@pytest.fixture
def storage(runs_made: Path, tmp_path: Path) -> Path:
    """A copy of that, to be changed."""
    shutil.copytree(runs_made, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def interrupted(storage: Path) -> Path:
    """A run whose driver was killed, as its journal tells."""
    journal = storage / "long" / "journal.jsonl"
    *kept, _ = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(kept))
    return storage / "long"
