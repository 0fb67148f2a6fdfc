"""Ctrl-C: real SIGINTs to drivers in every phase of a run."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

from drawbar import train
from drawbar._recovery import time_limit
from drawbar.train import (
    Backend,
    BackendConfig,
    Result,
    RunConfig,
    UserAbort,
    runs,
)
from drawbar.train._controller import background, controller
from tests.train.runs import fit

if TYPE_CHECKING:
    from tests.train.conftest import Drivers, Pipe

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

ABORTED = 3  # exit code of a driver whose fit() raised UserAbort


def main(
    function: Callable[[], Any], config: RunConfig, num_workers: int, **options: Any
) -> Callable[[], None]:
    """Return a main program that runs `fit` and whose exit code shows a `UserAbort`."""

    def program() -> None:
        try:
            fit(function, config, num_workers=num_workers, **options)
        except UserAbort as abort:
            print(abort)
            sys.exit(ABORTED)

    return program


def make_train_func(pipe: Pipe) -> Callable[[], int]:
    """Return a function that saves two steps in its first attempt and then runs forever."""

    def function() -> int:
        context, checkpoint = train.get_context(), train.get_checkpoint()
        first = int((Path(checkpoint) / "step").read_text()) + 1 if checkpoint else 0
        for step in range(first, 4):
            if context.get_attempt() == 0 and step == 2:
                run_forever(pipe)
            with train.checkpoint_dir() as path:
                (path / "step").write_text(str(step))
                train.report({"step": step}, checkpoint=path)
        return first

    return function


def run_forever(pipe: Pipe) -> None:
    try:
        pipe.send("trains", os.getpid())
        while True:
            threading.Event().wait(0.01)
    finally:
        pipe.send("finally", train.get_context().get_world_rank())


def assert_stopped(driver: subprocess.Popen[str], run: Path) -> None:
    """Assert that the driver ends soon with a `UserAbort` and a message about how to resume."""
    out, err = driver.communicate(timeout=300)
    assert driver.returncode == ABORTED, err
    assert f"the run is in {run}. To resume from the latest checkpoint, if there is one" in out
    assert "Traceback" not in err
    assert "never retrieved" not in err
    assert runs.find_run(run).status == "stopped"


def assert_resumes(pipe: Pipe, config: RunConfig, num_workers: int) -> None:
    ranks = max(num_workers, 1)
    result = fit(make_train_func(pipe), config, num_workers=ranks, in_threads=True)
    assert result.return_values == [2] * ranks
    frame = result.metrics_dataframe
    assert list(frame[frame["rank"] == 0]["step"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ctrl_c_once_stops_gracefully_and_resumes(
    run_config: RunConfig,
    tmp_path: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
    num_workers: int,
) -> None:
    ranks = max(num_workers, 1)
    with drivers(main(make_train_func(pipe), run_config, num_workers)) as driver:
        pids = [int(pipe.receive()[1]) for _ in range(ranks)]
        driver.send_signal(signal.SIGINT)
        assert sorted(pipe.receive() for _ in range(ranks)) == [
            ["finally", str(rank)] for rank in range(ranks)
        ]
        assert_stopped(driver, tmp_path / "run")
        wait_until_gone(pids)
    assert_resumes(pipe, run_config, num_workers)


@pytest.mark.parametrize(
    ("number", "num_workers", "code"),
    [
        pytest.param(signal.SIGINT, 2, ABORTED, marks=pytest.mark.nightly),
        (signal.SIGINT, 0, ABORTED),
        (signal.SIGTERM, 2, 143),
    ],
)
def test_ctrl_c_or_sigterm_saves_if_function_can(
    run_config: RunConfig,
    tmp_path: Path,
    drivers: Drivers,
    pipe: Pipe,
    number: signal.Signals,
    num_workers: int,
    code: int,
) -> None:
    def function() -> None:
        train.should_checkpoint()
        pipe.send("trains")
        while not train.should_checkpoint():
            pass
        with train.checkpoint_dir() as path:
            (path / "file").write_text("saved")
            train.report({}, checkpoint=path)
        while True:
            train.collective.barrier()

    with drivers(main(function, run_config, num_workers)) as driver:
        for _ in range(max(num_workers, 1)):
            assert pipe.receive() == ["trains"]
        driver.send_signal(number)
        _, err = driver.communicate(timeout=300)
    assert driver.returncode == code, err
    assert (tmp_path / "run" / "checkpoint_000000").is_dir()
    assert runs.find_run(tmp_path / "run").status == "stopped"


@pytest.mark.nightly
def test_ctrl_c_stops_function_that_calls_should_checkpoint_no_more(
    run_config: RunConfig, tmp_path: Path, drivers: Drivers, pipe: Pipe
) -> None:
    def function() -> None:
        train.should_checkpoint()
        run_forever(pipe)

    def program() -> None:
        time_limit.MIN_SAVE_WAIT_S = 0.1
        main(function, run_config, 2)()

    with drivers(program) as driver:
        for _ in range(2):
            assert pipe.receive()[0] == "trains"
        driver.send_signal(signal.SIGINT)
        assert_stopped(driver, tmp_path / "run")


def test_ctrl_c_twice_kills_workers(
    run_config: RunConfig,
    tmp_path: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
) -> None:
    def function() -> None:
        try:
            run_forever(pipe)
        finally:
            ctypes.CDLL(None).sleep(600)  # a long C call that cannot be interrupted

    def program() -> None:
        controller.STOP_GRACE_SECONDS = 600  # the first Ctrl-C alone would kill them after that
        main(function, run_config, 1)()

    with drivers(program) as driver:
        pid = int(pipe.receive()[1])
        driver.send_signal(signal.SIGINT)
        assert pipe.receive() == ["finally", "0"]
        driver.send_signal(signal.SIGINT)
        wait_until_gone([pid])
        assert_stopped(driver, tmp_path / "run")


@pytest.mark.usefixtures("occupied_cluster")
def test_ctrl_c_while_waiting_for_resources_stops(
    run_config: RunConfig, tmp_path: Path, drivers: Drivers, pipe: Pipe
) -> None:
    with drivers(main(make_train_func(pipe), run_config, 2)) as driver:
        assert driver.stderr is not None
        assert any("waiting for CPU=2" in line for line in driver.stderr)
        driver.send_signal(signal.SIGINT)
        assert_stopped(driver, tmp_path / "run")


def test_ctrl_c_while_workers_start_stops(
    run_config: RunConfig, tmp_path: Path, drivers: Drivers, pipe: Pipe
) -> None:
    with drivers(main(make_train_func(pipe), run_config, 1)) as driver:
        assert driver.stderr is not None
        # Not "starting Ray", before which there is no run.
        assert any(line.endswith("] starting\n") for line in driver.stderr)
        driver.send_signal(signal.SIGINT)
        assert_stopped(driver, tmp_path / "run")


class InterruptingBackend(Backend):
    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


class InterruptingConfig(BackendConfig):
    backend_cls = InterruptingBackend


def test_ctrl_c_before_first_attempt_stops(
    run_config: RunConfig, tmp_path: Path, drivers: Drivers
) -> None:
    backend = InterruptingConfig()
    with drivers(main(lambda: None, run_config, 0, backend_config=backend)) as driver:
        assert_stopped(driver, tmp_path / "run")


def test_ctrl_c_to_process_group_with_ray_stops(
    run_config: RunConfig,
    tmp_path: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
) -> None:
    with drivers(main(make_train_func(pipe), run_config, 1), RAY_ADDRESS="local") as driver:
        pid = int(pipe.receive()[1])
        os.killpg(driver.pid, signal.SIGINT)
        assert pipe.receive() == ["finally", "0"]
        assert_stopped(driver, tmp_path / "run")
        wait_until_gone([pid])


def test_ctrl_c_during_long_checksums_skips_them(tmp_path: Path, drivers: Drivers) -> None:
    def save() -> None:
        with train.checkpoint_dir() as path:
            with open(path / "huge", "wb") as file:
                file.truncate(10**12)  # one hole, which takes minutes to read
            train.report({"a": 1}, checkpoint=path)

    config = RunConfig(name="run", storage_path=tmp_path)

    def program() -> None:
        background.CLOSE_NOTICE_S = 0.1
        main(save, config, 0)()

    with drivers(program) as driver:
        assert driver.stderr is not None
        while "Training has ended. Waiting for checksums" not in driver.stderr.readline():
            assert driver.poll() is None
        driver.send_signal(signal.SIGINT)
        out, err = driver.communicate(timeout=300)
    assert driver.returncode == ABORTED, err
    assert "stopped by Ctrl-C" in out
    result = Result.from_path(tmp_path / "run")
    assert result.metrics == {"a": 1}
    assert result.checkpoint is not None
