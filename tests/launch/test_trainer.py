"""`ScriptTrainer`: what it refuses, and what a shell is told of how its run has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from drawbar import train
from drawbar.launch import ScriptTrainer, exit_code_of
from drawbar.train import ProgramFailedError, WorkerFailure, WorkerGroupError
from tests.launch.conftest import Launch


def test_what_is_no_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no script nowhere\.py"):
        ScriptTrainer("nowhere.py")
    with pytest.raises(ValueError, match="is a folder"):
        ScriptTrainer(tmp_path)
    with pytest.raises(ValueError, match="num_workers=0"):
        ScriptTrainer(__file__, scaling_config=train.ScalingConfig(num_workers=0))


@pytest.mark.parametrize(
    ("kind", "message", "code"),
    [
        ("died", "killed by SIGKILL, from outside", 137),
        ("died", "killed by SIGSEGV: Fatal Python error", 139),
        ("died", "vanished without a trace", 1),
        ("hang", "no rank made progress", 1),
    ],
)
def test_a_worker_that_dies_is_told_like_a_script(kind: str, message: str, code: int) -> None:
    failure = WorkerFailure(rank=1, kind=kind, type_name="worker process died", message=message)  # type: ignore[arg-type]
    assert exit_code_of(WorkerGroupError("failed", failures=[failure])) == code


def test_the_first_failure_counts() -> None:
    first, later = (ProgramFailedError("", "SystemExit", code, 0.0) for code in (3, 4))
    failures = [
        WorkerFailure(rank=rank, kind="exception", type_name="", message="") for rank in (1, 0)
    ]
    error = WorkerGroupError("failed", {0: later, 1: first}, failures=failures)
    assert exit_code_of(error) == 3
    assert exit_code_of(train.ControllerError("the disk is full")) == 1


def test_a_detached_run_is_found_again(launch: Launch) -> None:
    done = launch("from drawbar import train; train.report({'loss': 0.5})", "--detach")
    assert (done.code, done.out) == (0, b"run\n"), done.err
    assert train.attach(done.run).wait().metrics == {"loss": 0.5}
