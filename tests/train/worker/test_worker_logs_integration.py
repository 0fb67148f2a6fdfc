"""Worker output in the log files of a run and on the console."""

from __future__ import annotations

import contextlib
import logging
import os
import re
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

METHODS = ("printed", "warned", "written", "logged", "echoed")


def write_output() -> None:
    """Write a line with each method, and redraw a progress bar 1,000 times."""
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
        write_output,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run", storage_path=storage, logging_config=LoggingConfig(log_level=log_level)
        ),
    ).fit()


@dataclass(frozen=True)
class RunOutput:
    """Output of one run: lines of the driver's stdout and stderr, and text of the log files."""

    out: list[str]
    err: list[str]
    logs: list[str]


@pytest.fixture(scope="module")
def run_output(
    ray_cluster: None, drivers: Drivers, tmp_path_factory: pytest.TempPathFactory
) -> RunOutput:
    storage = tmp_path_factory.mktemp("logs")
    out, err = drivers.run(lambda: fit(storage))
    logs = [(storage / "run" / "logs" / f"rank_{rank}.log").read_text() for rank in range(2)]
    return RunOutput(out.splitlines(), err.splitlines(), logs)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_log_contains_output_of_worker_and_children(run_output: RunOutput, rank: int) -> None:
    for method in METHODS:
        assert run_output.logs[rank].count(f"{method} by {rank}\n") == 1
    assert run_output.logs[rank].count(f"bar of {rank}: ") >= 1000


def test_console_shows_lines_of_rank_0_once(run_output: RunOutput) -> None:
    assert run_output.out == ["printed by 0"]
    for method in METHODS[1:]:
        assert run_output.err.count(f"{method} by 0") == 1


def test_console_shows_only_errors_of_other_ranks(run_output: RunOutput) -> None:
    lines_of_rank_1 = [line for line in run_output.err if "by 1" in line or "of 1" in line]
    assert lines_of_rank_1 == ["[rank 1] ERROR mine: logged by 1"]


def test_console_with_progress_bar_shows_few_lines(run_output: RunOutput) -> None:
    bars = [line for line in run_output.err if line.startswith("bar of 0:")]
    assert 1 <= len(bars) < 20
    assert bars[-1].startswith("bar of 0: 100%")


def test_ray_does_not_forward_worker_output_again(run_output: RunOutput) -> None:
    assert not [line for line in run_output.out + run_output.err if "pid=" in line]


@pytest.mark.parametrize(("level", "shows_rank_0"), [("WARNING", True), ("ERROR", False)])
def test_console_with_log_level_shows_matching_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: str, shows_rank_0: bool
) -> None:
    fit(tmp_path, level)
    out, err = capsys.readouterr()
    notices = [line for line in err.splitlines() if line.startswith("[drawbar")]
    # On a slow machine, the console shows how many workers have started.
    assert all(re.search(r"\] starting \d+ workers, \d+ of them are ready", n) for n in notices)
    assert ("printed by 0" in out) == ("warned by 0" in err) == shows_rank_0
    assert ("echoed by 0" in err) == ("written by 0" in err) == shows_rank_0
    assert ("\nERROR mine: logged by 0" in f"\n{err}") != shows_rank_0
    assert err.count("logged by 0") == 1
    assert "[rank 1] ERROR mine: logged by 1" in err
    assert "printed by 0" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


@pytest.mark.parametrize("should_stop", [False, True])
def test_console_shows_cleanup_output_of_rank_0_after_failure_or_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pipe: Pipe, should_stop: bool
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def function() -> None:
        if train.get_context().get_world_rank() == 1 and not should_stop:
            gate.read_text()
            raise ValueError("boom")
        try:
            if train.get_context().get_world_rank() == 0:
                pipe.send("here")
            while True:
                train.collective.barrier()
        finally:
            print("cleaned up")

    run = DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=1 if should_stop else 2),
        run_config=RunConfig(name="run", storage_path=tmp_path),
    ).start()
    assert pipe.receive() == ["here"]
    if should_stop:
        run.stop(save=False)
    else:
        gate.write_text("")
    with contextlib.suppress(WorkerGroupError):
        run.wait()
    assert capsys.readouterr().out == "cleaned up\n"
