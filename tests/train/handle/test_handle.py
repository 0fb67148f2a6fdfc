"""`start()`: what a handle tells of a run while it goes on, and how it ends one."""

from __future__ import annotations

import contextlib
import json
import os
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
    DataParallelTrainer,
    RunConfig,
    RunHandle,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
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


def wait_for_ever() -> None:
    while True:
        threading.Event().wait(0.01)


def train_until_asked(pipe: Pipe) -> Callable[[], int]:
    """Make a function that saves when it is asked to; a second attempt returns where it began."""

    def function() -> int:
        checkpoint = train.get_checkpoint()
        if checkpoint is not None:
            return int((Path(checkpoint) / "step").read_text())
        pipe.say("trains")
        step = 0
        while True:
            step += 1
            if train.should_checkpoint():
                with train.checkpoint_dir() as path:
                    (path / "step").write_text("41")
                    train.report({"step": 41}, checkpoint=path)
                wait_for_ever()

    return function


def test_a_run_is_seen_while_it_goes_on(run_config: RunConfig, tmp_path: Path, pipe: Pipe) -> None:
    go_on = tmp_path / "go_on"

    def function() -> str:
        rank = train.get_context().get_world_rank()
        print("printed by", rank)
        train.report({"seen": rank * 10})
        train.collective.barrier()
        pipe.say(rank)
        while not go_on.exists():
            threading.Event().wait(0.01)
        return f"rank {rank}"

    run = trainer(function, run_config).start()
    assert (run.name, run.path, run.is_done) == ("run", str(tmp_path / "run"), False)
    for _ in range(2):
        pipe.hear()
    assert run.status == "running"
    assert run.metrics == {"seen": 0}
    assert run.metrics_by_rank == {0: {"seen": 0}, 1: {"seen": 10}}
    assert run.get_logs() == "printed by 0\n"
    assert run.get_logs(rank=1) == "printed by 1\n"
    assert [attempt.world_size for attempt in run.timeline.attempts] == [2]
    # It may still stand in `say`, in these tests' conftest.py.
    assert f": {Path(__file__).parents[1]}" in run.diagnose()
    assert repr(run).startswith("RunHandle('run', running, world size 2, metrics={'seen': 0}, path")
    with pytest.raises(ValueError, match="has the ranks 0 to 1, found 2"):
        run.get_logs(rank=2)
    with pytest.raises(TimeoutError, match=r"after 0\.1 s run 'run' in .*/run is not over"):
        run.wait(timeout=0.1)

    go_on.touch()
    result = run.wait()
    assert result.return_values == ["rank 0", "rank 1"]
    assert (run.status, run.is_done) == ("finished", True)
    assert run.wait(timeout=0).metrics == run.metrics == {"seen": 0}
    assert run.timeline.attempts[0].outcome == "finished"
    assert run.get_logs(rank=1) == "printed by 1\n"
    with pytest.raises(RuntimeError, match=r"is over \(finished\)"):
        run.diagnose()


def test_a_run_that_is_stopped_saves_first_and_resumes(run_config: RunConfig, pipe: Pipe) -> None:
    run = trainer(train_until_asked(pipe), run_config).start()
    for _ in range(2):
        pipe.hear()
    run.stop()
    result = run.wait()
    assert run.status == "stopped"
    assert result.error is None
    assert result.checkpoint is not None
    assert result.metrics == {"step": 41}
    assert trainer(train_until_asked(pipe), run_config).fit().return_values == [41, 41]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_saving_it_stops_at_once(
    run_config: RunConfig, pipe: Pipe, num_workers: int
) -> None:
    def function() -> None:
        try:
            pipe.say("trains", os.getpid())
            wait_for_ever()
        finally:
            pipe.say("finally")

    run = trainer(function, run_config, num_workers).start()
    pids = {int(pipe.hear()[1]) for _ in range(max(num_workers, 1))}
    assert (os.getpid() in pids) == (num_workers == 0)
    run.stop(save=False)
    assert [pipe.hear() for _ in range(max(num_workers, 1))] == [["finally"]] * len(pids)
    assert run.wait(timeout=60).checkpoint is None
    assert run.status == "stopped"


@pytest.mark.usefixtures("occupied_cluster")
def test_a_run_that_waits_for_resources_has_nothing_to_save(
    run_config: RunConfig, pipe: Pipe
) -> None:
    run = trainer(train_until_asked(pipe), run_config).start()
    assert run.status == "starting"
    assert run.get_logs() == ""
    run.stop()
    assert run.wait(timeout=60).checkpoint is None
    assert run.status == "stopped"


def test_a_stop_does_not_wait_for_a_dataset_that_is_being_made(run_config: RunConfig) -> None:
    begun, over = threading.Event(), threading.Event()

    def make() -> Any:
        begun.set()
        over.wait()

    run = DataParallelTrainer(
        print,
        datasets={"train": make},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    ).start()
    assert begun.wait(60)
    run.stop(save=False)
    try:
        assert run.wait(timeout=30).checkpoint is None
    finally:
        over.set()
    assert run.status == "stopped"


def test_what_cannot_start_fails_at_once_and_what_fails_later_in_wait(
    run_config: RunConfig,
) -> None:
    def function() -> None:
        raise ValueError("boom")

    with pytest.raises(TrainingFailedError, match="999 workers"):
        trainer(function, run_config, num_workers=999).start()
    run = trainer(function, run_config, num_workers=1).start()
    for _ in range(2):
        with pytest.raises(WorkerGroupError, match="rank 0: ValueError: boom"):
            run.wait()
    assert run.status == "failed"


def test_an_empty_name_is_no_run() -> None:
    with pytest.raises(ValueError, match=r"attach\(\) takes a run's name, .* found ''"):
        train.attach("")


@pytest.mark.parametrize("ending", [0, 1])
def test_a_program_that_ends_takes_its_run_along(
    run_config: RunConfig,
    tmp_path: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
    ending: int,
) -> None:
    def function() -> None:
        pipe.say(os.getpid())
        wait_for_ever()

    def main() -> None:
        trainer(function, run_config).start()
        pipe.say("started")
        (tmp_path / "go").read_text()
        if ending:
            raise ArithmeticError("of the program itself")

    os.mkfifo(tmp_path / "go")
    with drivers(main) as driver:
        heard = {pipe.hear()[0] for _ in range(3)}
        (tmp_path / "go").write_text("on")
        _, err = driver.communicate(timeout=60)
        wait_until_gone(int(pid) for pid in heard - {"started"})
    assert driver.returncode == ending
    assert "the program ends without wait()" in err
    assert "] stopped" in err
    assert "] failed" not in err
    assert ("ArithmeticError" in err) == ("Traceback" in err) == bool(ending)
    end = json.loads((tmp_path / "run" / "journal.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["outcome"]) == ("run_ended", "stopped")


def test_a_run_on_a_remote_filesystem_is_seen_too(
    tmp_path: Path, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def function() -> int:
        print("there")
        train.report({"step": 1})
        train.collective.barrier()
        pipe.say("trains")
        while not (tmp_path / "go_on").exists():
            threading.Event().wait(0.01)
        return 7

    def assert_seen(run: RunHandle) -> None:
        assert run.get_logs() == "there\n"
        assert run.metrics == {"step": 1}

    filesystem = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    config = RunConfig(name="run", storage_path="runs", storage_filesystem=filesystem)
    run = trainer(function, config, num_workers=1).start()
    pipe.hear()
    assert_seen(run)
    (tmp_path / "go_on").touch()
    assert run.wait().return_values == [7]
    attached = train.attach("runs/run", filesystem)
    assert attached.status == "finished"
    assert_seen(attached)
    assert attached.wait().metrics == {"step": 1}


@pytest.mark.parametrize("where", ["folder", "memory://runs"])
def test_a_run_in_a_thread_goes_on_after_the_program_s_last_line(
    tmp_path: Path, drivers: Drivers, where: str
) -> None:
    def function() -> None:
        with contextlib.suppress(RuntimeError), ThreadPoolExecutor(1) as pool:
            while True:  # until Python's own pools refuse work, soon after the last line
                pool.submit(int).result()
        for upload in (CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC):
            with train.checkpoint_dir() as path:
                for number in range(9):
                    (path / f"{number}").write_text("model")
                train.report({"rest": 1}, checkpoint=path, checkpoint_upload_mode=upload)

    class Callback(train.UserCallback):
        def after_report(self, *_: object) -> None:
            (tmp_path / "told").write_text("")

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
    assert (tmp_path / "told").exists()
