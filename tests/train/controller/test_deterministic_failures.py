"""Failures that a restart cannot help end the run: error, journal, command line, and exit code."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from drawbar import train
from drawbar.train import RunConfig, WorkerGroupError, runs
from drawbar.train.backend import measure_data_wait, register_batch_description
from tests.train.runs import fit

pytestmark = pytest.mark.usefixtures("ray_cluster")

SCRIPT = """
import logging, sys
import ray
from drawbar import train

def train_func():
    for step in range(3):
        if step == 2:
            raise ValueError(f"bad row {id(step)}")
        train.report({"step": step})

ray.init(logging_level=logging.ERROR)
train.DataParallelTrainer(
    train_func,
    scaling_config=train.ScalingConfig(num_workers=1),
    run_config=train.RunConfig(
        name="run", storage_path=sys.argv[1], detached=sys.argv[2] == "detached",
        failure_config=train.FailureConfig(max_failures=5),
    ),
).fit()
"""


def list_verdicts(run_config: RunConfig) -> list[dict[str, Any]]:
    """Return the verdicts in the journal of the run."""
    events: list[dict[str, Any]] = runs.find_run(f"{run_config.storage_path}/run").list_events()
    return [event["verdict"] for event in events if event["event"] == "attempt_ended"]


def list_kinds(run_config: RunConfig) -> list[str]:
    return [verdict["kind"] for verdict in list_verdicts(run_config)]


def test_exception_at_same_batch_ends_run_and_names_the_batch(run_config: RunConfig) -> None:
    def function() -> None:
        rows: list[int] = []
        register_batch_description(lambda: f"rows up to {rows[-1]}")
        first = 4 if train.get_checkpoint() else 0
        for row in measure_data_wait(range(first, 8)):
            rows.append(row)
            if row == 3:
                with train.checkpoint_dir() as path:
                    train.report({}, checkpoint=path)
            if row == 6 and train.get_context().get_world_rank() == 1:
                raise ValueError(f"bad row {os.getpid()}")
            train.collective.barrier()

    with pytest.raises(WorkerGroupError) as raised:
        fit(function, run_config, num_workers=2, max_failures=5)
    text = str(raised.value)
    assert "the same failure has happened twice at the same place, in two processes" in text
    assert "Look at the data of rank 1, batch 3 after 1 report (rows up to 6)." in text
    assert "FailureConfig(stop_when_deterministic=False)" in text
    assert not raised.value.should_retry
    assert list_kinds(run_config) == ["exception", "deterministic"]


@pytest.mark.parametrize(
    "signal_name", ["SIGSEGV", pytest.param("SIGABRT", marks=pytest.mark.nightly)]
)
def test_crash_at_same_batch_ends_run(run_config: RunConfig, signal_name: str) -> None:
    def function() -> None:
        for row in measure_data_wait(range(8)):
            if row == 4:
                ctypes.string_at(0) if signal_name == "SIGSEGV" else os.abort()

    with pytest.raises(WorkerGroupError, match="twice at the same place") as raised:
        fit(function, run_config, num_workers=1, max_failures=5)
    # The sentinel has read the count from the memory of the dead process.
    assert raised.value.failures[0].num_batches == 5
    assert f"batch 5 after 0 reports, process {raised.value.failures[0].pid}: killed by" in str(
        raised.value
    )
    assert list_kinds(run_config) == ["crash", "deterministic"]


def test_exception_at_another_batch_or_network_error_is_restarted(run_config: RunConfig) -> None:
    def function() -> None:
        attempt = train.get_context().get_attempt()
        for row in measure_data_wait(range(8)):
            if attempt < 2 and row == attempt:
                raise ValueError("bad row")
            if attempt in (2, 3) and row == 5:
                with socket.socket() as unused:
                    unused.bind(("127.0.0.1", 0))
                    address = unused.getsockname()
                socket.create_connection(address)

    fit(function, run_config, num_workers=1, max_failures=5)
    assert list_kinds(run_config) == ["exception", "exception", "network", "network"]


def test_rank_that_raises_gets_another_process(run_config: RunConfig) -> None:
    def function() -> bool:
        context = train.get_context()
        is_cached = "loaded" in context.cache
        context.cache["loaded"] = True
        train.collective.barrier()
        if (context.get_attempt(), context.get_world_rank()) == (0, 1):
            raise ValueError("once")
        train.collective.barrier()
        return is_cached

    assert fit(function, run_config, num_workers=2, max_failures=1).return_values == [True, False]


def test_killed_worker_is_restarted_as_often_as_allowed(run_config: RunConfig) -> None:
    def function() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        train.collective.barrier()

    with pytest.raises(WorkerGroupError, match="max_failures=2 is used up") as raised:
        fit(function, run_config, num_workers=1, max_failures=2)
    assert raised.value.should_retry
    assert "Cause: a process was killed from outside" in str(raised.value)
    assert list_kinds(run_config) == ["killed"] * 3


def test_stop_when_deterministic_false_uses_all_restarts(run_config: RunConfig) -> None:
    def function() -> None:
        raise ValueError("always")

    with pytest.raises(WorkerGroupError, match="max_failures=2 is used up"):
        fit(function, run_config, num_workers=1, max_failures=2, stop_when_deterministic=False)
    assert list_kinds(run_config) == ["exception"] * 3


@pytest.mark.nightly
def test_hang_at_same_batch_ends_run(run_config: RunConfig) -> None:
    def function() -> None:
        for row in measure_data_wait(range(8)):
            if row == 2 and train.get_context().get_world_rank() == 1:
                signal.pthread_sigmask(signal.SIG_BLOCK, ())
                signal.sigwait({signal.SIGUSR2})
            train.collective.barrier()

    with pytest.raises(train.HangError, match="data: batch 3 after 0 reports on all ranks") as hang:
        fit(function, run_config, num_workers=2, max_failures=5, hang_timeout=2)
    assert not hang.value.should_retry
    assert list_kinds(run_config) == ["hang", "deterministic"]


def run_script(tmp_path: Path, mode: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, str(script), str(tmp_path), mode]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("mode", ["attached", pytest.param("detached", marks=pytest.mark.nightly)])
def test_script_with_deterministic_failure_exits_with_70_and_its_retry_stops_at_once(
    tmp_path: Path, mode: str
) -> None:
    first = run_script(tmp_path, mode)
    assert first.returncode == 70, first.stderr
    assert first.stderr.count("twice at the same place") == 1
    retry = run_script(tmp_path, mode)
    assert retry.returncode == 70, retry.stderr
    assert "Attempt 1: " in retry.stderr
    assert "Attempt 2: " in retry.stderr
    assert list_kinds(RunConfig(storage_path=tmp_path)) == [
        *("exception", "deterministic", "deterministic")
    ]
    show = [sys.executable, "-m", "drawbar.cli", "show", str(tmp_path / "run")]
    shown = subprocess.check_output(show, text=True)
    assert "restart (max_failures: 4 of 5 left), exception: an exception of the function" in shown
    assert "stop, deterministic: the same failure has happened twice" in shown
    as_json = json.loads(subprocess.check_output([*show, "--json"]))
    assert "fix the code or the data" in as_json["attempts"][1]["decision"]
