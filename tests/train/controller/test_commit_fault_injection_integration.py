"""Checkpoint commits with real kills at each step: only committed checkpoints remain."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil
import pytest

from drawbar import train
from drawbar.train import (
    CheckpointUploadMode,
    Result,
    RunConfig,
    WorkerGroupError,
    collective,
)
from drawbar.train.backend import MemoryFiles, report_async
from drawbar.train.testing import FAULT_POINTS, check_run, kill_at
from tests.train.runs import fit

if TYPE_CHECKING:
    from tests.train.conftest import Drivers, Pipe

STEPS = 4
FATAL_STEP = 2
COMMIT_POINTS = [point for point in FAULT_POINTS if point.startswith("commit.")]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def do_nothing() -> None: ...


def make_train_func(
    directory: Path,
    before: Callable[[], None] = do_nothing,
    after: Callable[[], None] = do_nothing,
    **report_options: Any,
) -> Callable[[], list[str]]:
    """Return a function that saves three files per rank and step.

    It returns the files that it finds in the staging directory at its start. `before` and `after`
    are called around the report of the fatal step, in the first attempt only.
    """

    def function() -> list[str]:
        context = train.get_context()
        staged_files = os.listdir(context.get_storage() / ".staging")
        collective.barrier()
        rank = context.get_world_rank()
        rank_directory = directory / f"rank_{rank}"
        for step in range(next_step(), STEPS):
            rank_directory.mkdir(exist_ok=True)
            for name in ("model", "optimizer", "sampler"):
                (rank_directory / f"{name}_{rank}").write_text(str(step) * 1000)
            is_fatal = step == FATAL_STEP and context.get_attempt() == 0
            if is_fatal:
                before()
            train.report({"step": step}, checkpoint=rank_directory, **report_options)
            if is_fatal:
                after()
        return staged_files

    return function


def next_step() -> int:
    checkpoint = train.get_checkpoint()
    return read_step(checkpoint) + 1 if checkpoint else 0


def read_step(checkpoint: train.Checkpoint) -> int:
    return int((Path(checkpoint) / "model_0").read_text()[0])


def on_rank_1(action: Callable[[], None]) -> Callable[[], None]:
    return lambda: action() if train.get_context().get_world_rank() == 1 else None


def assert_intact(run: Path, latest_step: int) -> None:
    """Check that the checkpoints up to this step are intact, and that there are no others."""
    result = Result.from_path(run)
    checkpoints = [checkpoint for checkpoint, _ in result.best_checkpoints]
    assert [read_step(checkpoint) for checkpoint in checkpoints] == list(range(latest_step + 1))
    assert result.checkpoint == checkpoints[-1]
    assert sorted(run.glob("checkpoint_*")) == [Path(checkpoint) for checkpoint in checkpoints]
    for checkpoint in checkpoints:
        checkpoint.verify()


def assert_resumed(result: Result, num_workers: int) -> None:
    """Check that the second run removed staged files and made the missing steps."""
    assert result.return_values == [[]] * max(num_workers, 1)
    assert_intact(Path(result.path), latest_step=STEPS - 1)
    check_run(result.path)
    assert sum(attempt.num_checkpoints for attempt in result.timeline.attempts) == STEPS
    frame = result.metrics_dataframe
    for rank in range(max(num_workers, 1)):
        assert list(frame[frame["rank"] == rank]["step"]) == list(range(STEPS))


def resume_in_threads(directory: Path, run_config: RunConfig) -> Result:
    return fit(make_train_func(directory), run_config, num_workers=2, in_threads=True)


@pytest.mark.parametrize(
    ("point", "report_options"),
    [
        pytest.param("persist.start", {}, marks=pytest.mark.nightly),
        ("persist.half", {}),
        ("persist.half", {"delete_local_checkpoint_after_upload": True}),
    ],
)
@pytest.mark.usefixtures("ray_cluster")
def test_worker_killed_during_persist_loses_only_that_checkpoint(
    run_config: RunConfig, tmp_path: Path, point: str, report_options: dict[str, Any]
) -> None:
    kill = on_rank_1(lambda: kill_at(point))
    with pytest.raises(WorkerGroupError, match="SIGKILL"):
        fit(make_train_func(tmp_path, before=kill, **report_options), run_config, num_workers=2)
    assert not (tmp_path / "run" / ".staging").exists()
    assert_intact(tmp_path / "run", latest_step=FATAL_STEP - 1)
    assert_resumed(resume_in_threads(tmp_path, run_config), num_workers=2)


@pytest.mark.usefixtures("ray_cluster")
def test_worker_killed_after_report_keeps_its_checkpoint(
    run_config: RunConfig, tmp_path: Path
) -> None:
    die = on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(WorkerGroupError, match="SIGKILL"):
        fit(make_train_func(tmp_path, after=die), run_config, num_workers=2)
    latest_step = read_step(
        Result.from_path(tmp_path / "run").checkpoint or pytest.fail("no checkpoint")
    )
    assert latest_step >= FATAL_STEP  # rank 0 may have continued
    assert_intact(tmp_path / "run", latest_step)
    assert_resumed(fit(make_train_func(tmp_path), run_config, num_workers=2), num_workers=2)


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC])
def test_driver_killed_during_commit_leaves_intact_checkpoints(
    tmp_path: Path, drivers: Drivers, mode: CheckpointUploadMode
) -> None:
    report_options: dict[str, Any] = {"checkpoint_upload_mode": mode}
    report_options["delete_local_checkpoint_after_upload"] = False

    def drive(point: str) -> None:
        kill_at(point, occurrence=FATAL_STEP + 1)
        fit(make_train_func(tmp_path / point, **report_options), tmp_path / point)

    def main() -> None:  # forks, because importing Drawbar in each driver takes most of the time
        for point in COMMIT_POINTS:
            (tmp_path / point).mkdir()
            driver = multiprocessing.get_context("fork").Process(target=drive, args=[point])
            driver.start()
            driver.join()
            assert driver.exitcode == -signal.SIGKILL

    drivers.run(main)
    for point in COMMIT_POINTS:
        is_committed = COMMIT_POINTS.index(point) >= COMMIT_POINTS.index("commit.renamed")
        run = tmp_path / point / "run"
        assert_intact(run, latest_step=FATAL_STEP if is_committed else FATAL_STEP - 1)
        assert_resumed(fit(make_train_func(tmp_path / point), tmp_path / point), num_workers=0)


@pytest.mark.usefixtures("ray_cluster")
def test_driver_killed_during_merge_leaves_intact_checkpoints(
    run_config: RunConfig, tmp_path: Path, drivers: Drivers
) -> None:
    def main() -> None:
        kill_at("commit.merged", occurrence=FATAL_STEP + 1)
        fit(make_train_func(tmp_path), run_config, num_workers=2)

    with drivers(main) as driver:
        assert driver.wait() == -signal.SIGKILL, driver.communicate()
    assert_intact(tmp_path / "run", latest_step=FATAL_STEP - 1)
    assert_resumed(resume_in_threads(tmp_path, run_config), num_workers=2)


def wait_for_sentinels(workers: set[str]) -> list[int]:
    """Wait until each worker has a sentinel. Return all their pids, including a forking one."""
    while True:
        processes = psutil.process_iter(["cmdline"])
        lines = {process.pid: set(process.info["cmdline"] or []) for process in processes}
        sentinels = {
            pid: line & workers
            for pid, line in lines.items()
            if any(part.endswith("/sentinel.py") for part in line) and line & workers
        }
        if set().union(*sentinels.values()) == workers:
            return list(sentinels)


@pytest.mark.usefixtures("ray_cluster")
def test_driver_killed_takes_workers_children_and_sentinels_with_it(
    run_config: RunConfig,
    tmp_path: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
) -> None:
    def wait_for_child() -> None:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        pipe.send(os.getpid(), child.pid)
        child.wait()

    with drivers(
        lambda: fit(make_train_func(tmp_path, after=wait_for_child), run_config, num_workers=2)
    ) as driver:
        (worker_0, child_0), (worker_1, child_1) = pipe.receive(), pipe.receive()
        sentinels = wait_for_sentinels({worker_0, worker_1})
        driver.kill()
        wait_until_gone([*map(int, (worker_0, worker_1, child_0, child_1)), *sentinels])
    assert_intact(tmp_path / "run", latest_step=FATAL_STEP)
    assert_resumed(resume_in_threads(tmp_path, run_config), num_workers=2)


def test_driver_killed_takes_writer_process_with_it(
    ray_cluster: None,
    run_config: RunConfig,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
) -> None:
    def save(files: MemoryFiles) -> None:
        with files.open("state") as file:
            file.write(b"state")

    def function() -> None:
        report_async({}, save)
        train.get_all_reported_checkpoints()  # waits for the commit
        (writer,) = [
            child.pid for child in psutil.Process().children() if "writer" in str(child.cmdline())
        ]
        pipe.send(writer)
        signal.pause()

    with drivers(lambda: fit(function, run_config, num_workers=1)) as driver:
        (writer,) = pipe.receive()
        driver.kill()
        wait_until_gone([int(writer)], 45)  # less than the time for which it waits for a restart
