"""`start()`, `attach()`, and the handles that they return."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from drawbar import train
from drawbar.train import (
    CheckpointUploadMode,
    ControllerError,
    DataParallelTrainer,
    RunConfig,
    RunHandle,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
    runs,
)

if TYPE_CHECKING:
    from tests.train.conftest import Drivers, Pipe

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def trainer(
    function: Callable[[], Any], config: RunConfig, num_workers: int = 2
) -> DataParallelTrainer:
    scaling = ScalingConfig(num_workers=num_workers)
    return DataParallelTrainer(function, scaling_config=scaling, run_config=config)


def wait_forever() -> None:
    while True:
        threading.Event().wait(0.01)


def train_until_requested(pipe: Pipe) -> Callable[[], int]:
    """Return a function that saves on request. A second attempt returns the saved step."""

    def function() -> int:
        checkpoint = train.get_checkpoint()
        if checkpoint is not None:
            return int((Path(checkpoint) / "step").read_text())
        pipe.send("trains")
        step = 0
        while True:
            step += 1
            if train.should_checkpoint():
                with train.checkpoint_dir() as path:
                    (path / "step").write_text("41")
                    train.report({"step": 41}, checkpoint=path)
                wait_forever()

    return function


def test_handle_shows_running_and_finished_run(
    run_config: RunConfig, tmp_path: Path, pipe: Pipe
) -> None:
    finish_file = tmp_path / "finish_file"

    def function() -> str:
        rank = train.get_context().get_world_rank()
        print("printed by", rank)
        train.report({"seen": rank * 10})
        train.collective.barrier()
        pipe.send(rank)
        while not finish_file.exists():
            threading.Event().wait(0.01)
        return f"rank {rank}"

    run = trainer(function, run_config).start()
    assert (run.name, run.path, run.is_done) == ("run", str(tmp_path / "run"), False)
    for _ in range(2):
        pipe.receive()
    assert run.status == "running"
    assert run.metrics == {"seen": 0}
    assert run.metrics_by_rank == {0: {"seen": 0}, 1: {"seen": 10}}
    assert run.get_logs() == "printed by 0\n"
    assert run.get_logs(rank=1) == "printed by 1\n"
    assert [attempt.world_size for attempt in run.timeline.attempts] == [2]
    # The worker may still be in `say`, in the conftest.py of these tests.
    assert f": {Path(__file__).parents[1]}" in run.diagnose()
    assert repr(run).startswith("RunHandle('run', running, world size 2, metrics={'seen': 0}, path")
    with pytest.raises(ValueError, match="rank must be >= 0 and < 2, found 2"):
        run.get_logs(rank=2)
    with pytest.raises(ValueError, match="rank must be >= 0 and < 2, found -1"):
        run.get_logs(rank=-1)
    with pytest.raises(TimeoutError, match=r"after 0\.1 s run 'run' in .*/run has not ended"):
        run.wait(timeout=0.1)

    finish_file.touch()
    result = run.wait()
    assert result.return_values == ["rank 0", "rank 1"]
    assert (run.status, run.is_done) == ("finished", True)
    assert run.wait(timeout=0).metrics == run.metrics == {"seen": 0}
    assert run.timeline.attempts[0].outcome == "finished"
    assert run.get_logs(rank=1) == "printed by 1\n"
    with pytest.raises(RuntimeError, match=r"has ended \(finished\)"):
        run.diagnose()


def test_stop_saves_checkpoint_and_run_resumes(run_config: RunConfig, pipe: Pipe) -> None:
    run = trainer(train_until_requested(pipe), run_config).start()
    for _ in range(2):
        pipe.receive()
    run.stop()
    result = run.wait()
    assert run.status == "stopped"
    assert result.error is None
    assert result.checkpoint is not None
    assert result.metrics == {"step": 41}
    resumed = trainer(train_until_requested(pipe), run_config, num_workers=0).fit()
    assert resumed.return_value == 41


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stop_without_saving_interrupts_functions(
    run_config: RunConfig, pipe: Pipe, num_workers: int
) -> None:
    def function() -> None:
        try:
            pipe.send("trains", os.getpid())
            wait_forever()
        finally:
            pipe.send("finally")

    run = trainer(function, run_config, num_workers).start()
    assert (os.getpid() == int(pipe.receive()[1])) == (num_workers == 0)
    run.stop(save=False)
    assert pipe.receive() == ["finally"]
    assert run.wait(timeout=300).checkpoint is None
    assert run.status == "stopped"


@pytest.mark.usefixtures("occupied_cluster")
def test_stop_while_waiting_for_resources_ends_run(run_config: RunConfig, pipe: Pipe) -> None:
    run = trainer(train_until_requested(pipe), run_config).start()
    assert run.status == "starting"
    assert run.get_logs() == ""
    run.stop()
    assert run.wait(timeout=300).checkpoint is None
    assert run.status == "stopped"


def test_stop_during_dataset_factory_ends_run(run_config: RunConfig) -> None:
    has_started, can_end = threading.Event(), threading.Event()

    def make() -> Any:
        has_started.set()
        can_end.wait()

    run = DataParallelTrainer(
        print,
        datasets={"train": make},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    ).start()
    assert has_started.wait(300)
    run.stop(save=False)
    try:
        assert run.wait(timeout=300).checkpoint is None
    finally:
        can_end.set()
    assert run.status == "stopped"


def test_start_raises_at_once_and_wait_raises_later_errors(
    run_config: RunConfig,
) -> None:
    def function() -> None:
        raise ValueError("boom")

    with pytest.raises(TrainingFailedError, match="999 workers"):
        trainer(function, run_config, num_workers=999).start()
    run = trainer(function, run_config, num_workers=0).start()
    for _ in range(2):
        with pytest.raises(WorkerGroupError, match="rank 0: ValueError: boom"):
            run.wait()
    assert run.status == "failed"


def test_attach_with_empty_name_raises() -> None:
    with pytest.raises(ValueError, match=r"attach\(\) needs the name, .* found ''"):
        train.attach("")


@pytest.mark.parametrize(("ending", "num_workers"), [(0, 1), (1, 0)])
def test_program_exit_stops_run(
    run_config: RunConfig,
    tmp_path: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
    ending: int,
    num_workers: int,
) -> None:
    def function() -> None:
        pipe.send(os.getpid())
        wait_forever()

    def main() -> None:
        trainer(function, run_config, num_workers).start()
        pipe.send("started")
        (tmp_path / "go").read_text()
        if ending:
            raise ArithmeticError("of the program itself")

    os.mkfifo(tmp_path / "go")
    with drivers(main) as driver:
        received = {pipe.receive()[0] for _ in range(2)}
        (tmp_path / "go").write_text("on")
        _, err = driver.communicate(timeout=300)
        wait_until_gone(int(pid) for pid in received - {"started"})
    assert driver.returncode == ending
    assert "the program exits before the run has ended" in err
    assert "] stopped" in err
    assert "] failed" not in err
    assert ("ArithmeticError" in err) == ("Traceback" in err) == bool(ending)
    assert runs.find_run(tmp_path / "run").status == "stopped"


def test_handle_with_remote_filesystem_shows_run(
    tmp_path: Path, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def function() -> int:
        print("there")
        train.report({"step": 1})
        train.collective.barrier()
        pipe.send("trains")
        while not (tmp_path / "finish_file").exists():
            threading.Event().wait(0.01)
        return 7

    def assert_seen(run: RunHandle) -> None:
        assert run.get_logs() == "there\n"
        assert run.metrics == {"step": 1}

    filesystem = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    config = RunConfig(name="run", storage_path="runs", storage_filesystem=filesystem)
    run = trainer(function, config, num_workers=1).start()
    pipe.receive()
    assert_seen(run)
    (tmp_path / "finish_file").touch()
    assert run.wait().return_values == [7]
    attached = train.attach("runs/run", filesystem)
    assert attached.status == "finished"
    assert_seen(attached)
    assert attached.wait().metrics == {"step": 1}


@pytest.mark.parametrize("where", ["folder", "memory://runs"])
def test_fit_in_thread_continues_after_end_of_main_thread(
    tmp_path: Path, drivers: Drivers, where: str
) -> None:
    def function() -> None:
        with contextlib.suppress(RuntimeError), ThreadPoolExecutor(1) as pool:
            while True:  # until Python's thread pools reject work, soon after the last line
                pool.submit(int).result()
        for upload in (CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC):
            with train.checkpoint_dir() as path:
                for number in range(9):
                    (path / f"{number}").write_text("model")
                train.report({"rest": 1}, checkpoint=path, checkpoint_upload_mode=upload)

    class Callback(train.UserCallback):
        def after_report(self, *_: object) -> None:
            (tmp_path / "reported").write_text("")

    storage = str(tmp_path) if where == "folder" else where

    def fit() -> None:
        result = DataParallelTrainer(
            function,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="run", storage_path=storage, callbacks=[Callback()]),
        ).fit()
        assert result.checkpoint is not None
        result.checkpoint.verify()
        (tmp_path / "ended").write_text(result.checkpoint.path.rpartition("/")[2])

    def main() -> None:
        threading.Thread(target=fit).start()

    _, err = drivers.run(main, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "Traceback" not in err
    assert (tmp_path / "ended").read_text() == "checkpoint_000001"
    assert (tmp_path / "reported").exists()


def test_handle_of_suspended_and_killed_driver_shows_failed_run(
    tmp_path: Path, run_config: RunConfig, drivers: Drivers, pipe: Pipe
) -> None:
    def function() -> None:
        print("printed")
        train.report({"step": 1})
        train.collective.barrier()
        pipe.send("trains")
        wait_forever()

    with drivers(lambda: trainer(function, run_config, num_workers=0).fit()) as driver:
        pipe.receive()
        run = train.attach(tmp_path / "run")
        driver.send_signal(signal.SIGSTOP)
        assert (run.status, run.is_done, run.metrics) == ("running", False, {"step": 1})
        assert run.get_logs().startswith("printed\n")
        driver.kill()
        driver.wait(300)
    with pytest.raises(ControllerError, match="process that hosted the run died"):
        run.wait(300)
    assert (run.status, run.is_done, run.metrics) == ("failed", True, {"step": 1})
    assert run.timeline.attempts[0].world_size == 1
