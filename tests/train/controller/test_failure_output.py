"""Output of a failed run: each failure is printed once, with the user's line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

SCRIPT = """
import logging, os, sys, threading
import ray
from drawbar import train
from drawbar.train._controller import recovery
from drawbar.train import (
    Checkpoint, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig
)

def missing():
    train.collective.barrier()  # no rank is interrupted before it fails too
    train.report({}, checkpoint=Checkpoint("/nonexistent/checkpoint"))

def die():
    if train.get_context().get_world_rank() == 1 and train.get_context().get_attempt() == 0:
        os.kill(os.getpid(), 9)
    train.collective.barrier()
    raise ValueError("boom")

lock = threading.Lock()

def captures_a_lock():
    lock.acquire()

name, storage, num_workers = sys.argv[1:]
if num_workers != "0":
    ray.init(logging_level=logging.ERROR)
recovery.FAIL_GRACE_SECONDS = 60  # a busy machine must not interrupt a rank before it fails too
DataParallelTrainer(
    globals()[name],
    scaling_config=ScalingConfig(num_workers=int(num_workers)),
    run_config=RunConfig(
        name="run",
        storage_path=storage,
        failure_config=FailureConfig(max_failures=int(name == "die")),
    ),
).fit()
"""


RunScript = Callable[[str, int], subprocess.CompletedProcess[str]]


@pytest.fixture
def run_script(tmp_path: Path, ray_cluster: None) -> RunScript:
    """Run a function of the script, which must fail, on a number of workers of the tests' Ray."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run_script(name: str, num_workers: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), name, str(tmp_path / "runs"), str(num_workers)]
        environ = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        return done

    return run_script


@pytest.mark.alone  # a rank that fails late prints its failure, too
def test_missing_checkpoint_prints_its_message_once(run_script: RunScript) -> None:
    done = run_script("missing", 2)
    assert done.stderr.count("report() received Checkpoint") == 2  # a short headline, a traceback
    assert done.stderr.count("use CheckpointUploadMode.NO_UPLOAD") == 1
    assert ": the same FileNotFoundError (" in done.stderr


@pytest.mark.alone  # Ray may print more if the machine is busy
def test_failure_of_last_attempt_is_printed_only_by_the_exception(run_script: RunScript) -> None:
    done = run_script("die", 2)
    before, _, exception = done.stderr.partition("Traceback (most recent call last):\n  File")
    assert before.count("killed by SIGKILL") == 1  # failure of the first attempt
    assert "restarting: attempt 1 (max_failures: 0 of 1 left)" in before
    assert "boom" not in before
    assert "ValueError: boom" in exception
    assert "(raylet)" not in done.stdout + done.stderr


def test_preflight_error_starts_at_the_user_line(run_script: RunScript) -> None:
    done = run_script("captures_a_lock", 0)
    lines = done.stderr.splitlines()
    files = [line for line in lines if line.startswith("  File ")]
    assert "script.py" in files[0]
    assert len(files) <= 2, done.stderr  # the user's line, and fit()
    assert "cannot be sent to the workers" in done.stderr
    assert "The above exception was the direct cause" not in done.stderr
