"""Hang detection, stalled ranks, and diagnosis of real processes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest

from drawbar import train
from drawbar.train import (
    DataParallelTrainer,
    FailureConfig,
    HangError,
    RunConfig,
    RunHandle,
    ScalingConfig,
    collective,
    runs,
)
from tests.train.runs import fit

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

on_ray = pytest.mark.usefixtures("ray_cluster")

TIMEOUT_S = 5
"""Timeout that a rank which waits for a core on a busy machine does not reach."""


def trainer(
    function: object, config: RunConfig, num_workers: int = 2, **failure: object
) -> DataParallelTrainer:
    return DataParallelTrainer(
        function,  # type: ignore[arg-type]  # local functions of any shape
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name=config.name,
            storage_path=config.storage_path,
            failure_config=FailureConfig(**failure),  # type: ignore[arg-type]
        ),
    )


def block_rank_1() -> None:
    if train.get_context().get_world_rank() == 1:
        threading.Event().wait()
    collective.barrier()


@on_ray
def test_hang_report_names_outlier_rank(run_config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(HangError) as raised:
        trainer(block_rank_1, run_config, hang_timeout=TIMEOUT_S).fit()
    first = block_rank_1.__code__.co_firstlineno
    assert f"no rank made progress for {TIMEOUT_S} s" in str(raised.value)
    assert f"rank 0: {__file__}:{first + 3} in block_rank_1" in str(raised.value)
    assert f"rank 1: {__file__}:{first + 2} in block_rank_1" in str(raised.value)
    stacks = sorted(path.name for path in (tmp_path / "run" / "stacks" / "hang_0").iterdir())
    assert stacks == ["difference.txt", "rank_0.txt", "rank_1.txt"]


@pytest.mark.nightly
@on_ray
def test_stall_warning_does_not_delay_hang_timeout(run_config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(HangError):
        trainer(block_rank_1, run_config, hang_timeout=TIMEOUT_S, stall_warning_after=1).fit()
    found = runs.find_run(tmp_path / "run").list_events()
    assert [event["event"] for event in found].count("ranks_quiet") == 1


def test_hang_uses_max_failures_and_restarts(run_config: RunConfig) -> None:
    def function() -> int:
        attempt = train.get_context().get_attempt()
        while attempt == 0:
            threading.Event().wait(0.01)
        return attempt

    limits = {"hang_timeout": TIMEOUT_S, "max_failures": 1}
    result = fit(function, run_config, num_workers=2, in_threads=True, **limits)
    assert result.return_values == [1, 1]


def test_context_diagnose_returns_location_of_each_rank(
    run_config: RunConfig, tmp_path: Path
) -> None:
    def function() -> str:
        difference = ""
        if train.get_context().get_world_rank() == 0:
            difference = train.get_context().diagnose()
        collective.barrier()
        return difference

    result = fit(function, run_config, num_workers=2, in_threads=True)
    assert "rank 0: " in result.return_values[0]
    assert "rank 1: " in result.return_values[0]
    assert len(list((tmp_path / "run" / "stacks").glob("diagnosis_*/rank_*.txt"))) == 2


def test_sigusr1_to_driver_writes_stacks(run_config: RunConfig, tmp_path: Path) -> None:
    driver = os.getpid()

    def function() -> None:
        if train.get_context().get_world_rank() == 0:
            os.kill(driver, signal.SIGUSR1)
        stacks = train.get_context().get_storage() / "stacks"
        while not any(collective.all_gather(list(stacks.glob("diagnosis_*/difference.txt")))):
            pass

    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # Ray Tune leaves a handler behind
    fit(function, run_config, num_workers=2, in_threads=True)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def wait_in_c(gate: Path) -> None:
    file = os.open(gate, os.O_RDWR)  # with O_RDONLY, opening the FIFO would wait
    ctypes.PyDLL(None).read(file, ctypes.create_string_buffer(1), 1)  # holds the interpreter lock


def wait_for_child(gate: Path) -> None:
    subprocess.run(["head", "--bytes=1", gate], check=False)


def freeze(gate: Path) -> None:
    # With `os.kill()`, this thread might enter the barrier before another one receives the signal.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


STALLS = {
    1: (wait_in_c, "it does not respond: it is frozen, or in one long call"),
    2: (wait_for_child, "in wait_for_child, inside "),
    3: (freeze, "it is stopped (state T): kill -CONT "),
}


def print_for(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        print("loading", end=" ")
        threading.Event().wait(0.05)


@on_ray
def test_rank_that_only_prints_is_active(run_config: RunConfig, tmp_path: Path) -> None:
    def function() -> None:
        if train.get_context().get_world_rank() == 1:
            print_for(3 * TIMEOUT_S)
        collective.barrier()

    trainer(function, run_config, hang_timeout=TIMEOUT_S, stall_warning_after=TIMEOUT_S).fit()
    events = runs.find_run(tmp_path / "run").list_events()
    assert "ranks_quiet" not in [event["event"] for event in events]


@pytest.mark.nightly
def test_local_function_that_only_prints_is_active(run_config: RunConfig) -> None:
    fit(lambda: print_for(2 * TIMEOUT_S), run_config, hang_timeout=TIMEOUT_S)


def wait_for_stalled_rank(run: RunHandle) -> str:
    while not (stalled := run.stalled_ranks):
        assert not run.is_done
        threading.Event().wait(0.01)
    assert list(stalled) == [1]
    return stalled[1]


@on_ray
def test_stalled_rank_is_reported_after_others_have_finished(
    run_config: RunConfig, tmp_path: Path
) -> None:
    os.mkfifo(gate := tmp_path / "gate")

    def function() -> None:
        if train.get_context().get_world_rank() == 1:
            wait_for_child(gate)

    run = trainer(function, run_config, stall_warning_after=1).start()
    assert ", and rank 0 has finished: it is at " in wait_for_stalled_rank(run)
    gate.write_text("x")
    run.wait()


@on_ray
def test_stalled_rank_is_reported_while_another_one_reports(
    run_config: RunConfig, tmp_path: Path
) -> None:
    os.mkfifo(gate := tmp_path / "gate")

    def function() -> None:
        train.report({"step": 0})
        rank = train.get_context().get_world_rank()
        if rank == 1:
            wait_for_child(gate)
        while rank == 0 and not (tmp_path / "end").exists():
            train.report({"step": 1})
            threading.Event().wait(0.01)

    run = trainer(function, run_config, stall_warning_after=1).start()
    assert " reports behind rank 0: it is at " in wait_for_stalled_rank(run)
    gate.write_text("x")
    (tmp_path / "end").touch()
    run.wait()


@on_ray
def test_hang_of_last_running_rank_ends_attempt(run_config: RunConfig) -> None:
    def function() -> None:
        if train.get_context().get_world_rank() == 1:
            threading.Event().wait()

    with pytest.raises(HangError) as raised:
        trainer(function, run_config, hang_timeout=2).fit()
    assert f"rank 1: {__file__}:{function.__code__.co_firstlineno + 2} in " in str(raised.value)
    assert "rank 0: not in the training function" in str(raised.value)


@on_ray
def test_stalled_ranks_that_others_wait_for_are_reported_once_and_cleared(
    run_config: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gates = {rank: tmp_path / f"gate_{rank}" for rank in STALLS}
    for gate in gates.values():
        os.mkfifo(gate)

    def function() -> None:
        train.report({"step": 0})
        rank = train.get_context().get_world_rank()
        (tmp_path / f"pid_{rank}").write_text(str(os.getpid()))
        if rank in STALLS:
            stop, _ = STALLS[rank]
            stop(gates[rank])
        collective.barrier()
        while not any(collective.all_gather((tmp_path / "end").exists())):
            threading.Event().wait(0.01)

    run = trainer(function, run_config, 1 + len(STALLS), stall_warning_after=TIMEOUT_S).start()
    while len(stalled := run.stalled_ranks) < len(STALLS):
        assert not run.is_done
        threading.Event().wait(0.01)
    for rank, (_, state) in STALLS.items():
        assert f"rank {rank} has shown no activity for" in stalled[rank]
        assert "while rank 0 waits in collective #0 (barrier)" in stalled[rank]
        assert state in stalled[rank]
    assert "stalled ranks 1, 2, 3" in repr(run)
    for rank, gate in gates.items():
        if STALLS[rank][0] is freeze:
            os.kill(int((tmp_path / f"pid_{rank}").read_text()), signal.SIGCONT)
        else:
            gate.write_text("x")
    while run.stalled_ranks:
        assert not run.is_done
        threading.Event().wait(0.01)
    (tmp_path / "end").touch()
    run.wait()
    err = capfd.readouterr().err
    assert [err.count(text) for text in stalled.values()] == [1, 1, 1]
    assert "All ranks are active again." in err
