"""What the workers print: all of it in the run's files, what is worth showing on the console."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle
import pytest
from tqdm import tqdm

from drawbar import train
from drawbar.train import (
    DataParallelTrainer,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)

if TYPE_CHECKING:
    from tests.train.conftest import Drivers, Pipe

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

WAYS = ("printed", "warned", "written", "logged", "echoed")


def speak() -> None:
    """Say something in every way there is, with the rank, and redraw a bar a thousand times."""
    rank = train.get_context().get_world_rank()
    print("printed by", rank)
    print("warned by", rank, file=sys.stderr)
    os.write(1, f"written by {rank}\n".encode())
    logging.getLogger("mine").error("logged by %d", rank)
    subprocess.run(["echo", f"echoed by {rank}"], check=True)
    for _ in tqdm(range(1000), desc=f"bar of {rank}", mininterval=0):
        pass


def fit(storage: Path, log_level: str = "INFO") -> None:
    DataParallelTrainer(
        speak,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run", storage_path=storage, logging_config=LoggingConfig(log_level=log_level)
        ),
    ).fit()


@dataclass(frozen=True)
class Said:
    """What one run said: the lines of the driver's two streams, and the run's log files."""

    out: list[str]
    err: list[str]
    logs: list[str]


@pytest.fixture(scope="module")
def said(ray_cluster: None, drivers: Drivers, tmp_path_factory: pytest.TempPathFactory) -> Said:
    storage = tmp_path_factory.mktemp("logs")
    out, err = drivers.run(lambda: fit(storage))
    logs = [(storage / "run" / "logs" / f"rank_{rank}.log").read_text() for rank in range(2)]
    return Said(out.splitlines(), err.splitlines(), logs)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_ranks_file_has_all_that_it_and_its_children_said(said: Said, rank: int) -> None:
    for way in WAYS:
        assert said.logs[rank].count(f"{way} by {rank}\n") == 1
    assert said.logs[rank].count(f"bar of {rank}: ") >= 1000


def test_the_console_has_rank_0s_lines_once_and_as_they_are(said: Said) -> None:
    assert said.out == ["printed by 0"]
    for way in WAYS[1:]:
        assert said.err.count(f"{way} by 0") == 1


def test_the_console_has_of_the_others_the_errors_only(said: Said) -> None:
    of_rank_1 = [line for line in said.err if "by 1" in line or "of 1" in line]
    assert of_rank_1 == ["[rank 1] ERROR mine: logged by 1"]


def test_a_progress_bar_does_not_flood_the_console(said: Said) -> None:
    bars = [line for line in said.err if line.startswith("bar of 0:")]
    assert 1 <= len(bars) < 20
    assert bars[-1].startswith("bar of 0: 100%")


def test_ray_forwards_nothing_a_second_time(said: Said) -> None:
    assert not [line for line in said.out + said.err if "pid=" in line]


@pytest.mark.parametrize(("level", "shows_rank_0"), [("WARNING", True), ("ERROR", False)])
def test_the_level_says_what_the_console_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str, shows_rank_0: bool
) -> None:
    fit(tmp_path, level)
    out, err = capsys.readouterr()
    notices = [line for line in err.splitlines() if line.startswith("[drawbar")]
    assert all("starting" in line for line in notices)  # on a machine that is slow today
    assert ("printed by 0" in out) == ("warned by 0" in err) == shows_rank_0
    assert ("echoed by 0" in err) == ("written by 0" in err) == shows_rank_0
    assert ("\nERROR mine: logged by 0" in f"\n{err}") != shows_rank_0
    assert err.count("logged by 0") == 1
    assert "[rank 1] ERROR mine: logged by 1" in err
    assert "printed by 0" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


@pytest.mark.parametrize("stops", [False, True])
def test_the_console_has_what_rank_0_prints_when_another_failed_or_the_user_stops_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pipe: Pipe, stops: bool
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def function() -> None:
        if train.get_context().get_world_rank() == 1 and not stops:
            gate.read_text()
            raise ValueError("boom")
        try:
            if train.get_context().get_world_rank() == 0:
                pipe.say("here")
            while True:
                train.collective.barrier()
        finally:
            print("cleaned up")

    run = DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=tmp_path),
    ).start()
    assert pipe.hear() == ["here"]
    if stops:
        run.stop(save=False)
    else:
        gate.write_text("")
    with contextlib.suppress(WorkerGroupError):
        run.wait()
    assert capsys.readouterr().out == "cleaned up\n"
