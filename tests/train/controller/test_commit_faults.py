"""Real kills at each step of a checkpoint commit: what is committed loads, all else is unseen."""

from __future__ import annotations

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
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
    collective,
)
from drawbar.train.testing import FAULT_POINTS, check_run, kill_at

if TYPE_CHECKING:
    from tests.train.conftest import Drivers, Pipe

STEPS = 4
FATAL_STEP = 2
COMMIT_POINTS = [point for point in FAULT_POINTS if point.startswith("commit.")]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def nothing() -> None: ...


def saving(
    folder: Path,
    before: Callable[[], None] = nothing,
    after: Callable[[], None] = nothing,
    **how: Any,
) -> Callable[[], list[str]]:
    """Make a function that saves three files per rank and step and gives what it found staged.

    `before` and `after` are called around the report of the fatal step, in the first attempt only.
    """

    def function() -> list[str]:
        context = train.get_context()
        leftovers = os.listdir(context.get_storage() / ".staging")
        collective.barrier()
        rank = context.get_world_rank()
        mine = folder / f"rank_{rank}"
        for step in range(next_step(), STEPS):
            mine.mkdir(exist_ok=True)
            for name in ("model", "optimizer", "sampler"):
                (mine / f"{name}_{rank}").write_text(str(step) * 1000)
            fatal = step == FATAL_STEP and context.get_attempt() == 0
            if fatal:
                before()
            train.report({"step": step}, checkpoint=mine, **how)
            if fatal:
                after()
        return leftovers

    return function


def next_step() -> int:
    checkpoint = train.get_checkpoint()
    return step_of(checkpoint) + 1 if checkpoint else 0


def step_of(checkpoint: train.Checkpoint) -> int:
    return int((Path(checkpoint) / "model_0").read_text()[0])


def on_rank_1(action: Callable[[], None]) -> Callable[[], None]:
    return lambda: action() if train.get_context().get_world_rank() == 1 else None


def fit(function: Callable[[], Any], config: RunConfig, num_workers: int) -> Result:
    scaling = ScalingConfig(num_workers=num_workers)
    return DataParallelTrainer(function, scaling_config=scaling, run_config=config).fit()


def assert_intact(run: Path, newest: int) -> None:
    """Steps up to `newest` are there, whole, and nothing else looks like a checkpoint."""
    result = Result.from_path(run)
    checkpoints = [checkpoint for checkpoint, _ in result.best_checkpoints]
    assert [step_of(checkpoint) for checkpoint in checkpoints] == list(range(newest + 1))
    assert result.checkpoint == checkpoints[-1]
    assert sorted(run.glob("checkpoint_*")) == [Path(checkpoint) for checkpoint in checkpoints]
    for checkpoint in checkpoints:
        checkpoint.verify()


def assert_resumed(result: Result, num_workers: int) -> None:
    """The second run swept the leftovers, made the missing steps, and the journal is whole."""
    assert result.return_values == [[]] * max(num_workers, 1)
    assert_intact(Path(result.path), newest=STEPS - 1)
    check_run(result.path)
    assert sum(attempt.num_checkpoints for attempt in result.timeline.attempts) == STEPS
    frame = result.metrics_dataframe
    for rank in range(max(num_workers, 1)):
        assert list(frame[frame["rank"] == rank]["step"]) == list(range(STEPS))


@pytest.mark.parametrize(
    ("point", "how"),
    [
        ("persist.start", {}),
        ("persist.half", {}),
        ("persist.half", {"delete_local_checkpoint_after_upload": True}),
    ],
)
@pytest.mark.usefixtures("ray_cluster")
def test_a_worker_killed_while_it_persists(
    run_config: RunConfig, tmp_path: Path, point: str, how: dict[str, Any]
) -> None:
    with pytest.raises(WorkerGroupError, match="SIGKILL"):
        fit(saving(tmp_path, before=on_rank_1(lambda: kill_at(point)), **how), run_config, 2)
    assert not (tmp_path / "run" / ".staging").exists()
    assert_intact(tmp_path / "run", newest=FATAL_STEP - 1)
    assert_resumed(fit(saving(tmp_path), run_config, 2), num_workers=2)


@pytest.mark.usefixtures("ray_cluster")
def test_a_worker_killed_after_its_report_is_acknowledged(
    run_config: RunConfig, tmp_path: Path
) -> None:
    die = on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(WorkerGroupError, match="SIGKILL"):
        fit(saving(tmp_path, after=die), run_config, 2)
    newest = step_of(Result.from_path(tmp_path / "run").checkpoint or pytest.fail("no checkpoint"))
    assert newest >= FATAL_STEP  # rank 0 may have gone on
    assert_intact(tmp_path / "run", newest)
    assert_resumed(fit(saving(tmp_path), run_config, 2), num_workers=2)


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC])
@pytest.mark.parametrize("point", COMMIT_POINTS)
def test_a_driver_killed_while_it_commits(
    run_config: RunConfig, tmp_path: Path, drivers: Drivers, point: str, mode: CheckpointUploadMode
) -> None:
    how: dict[str, Any] = {"checkpoint_upload_mode": mode}
    how["delete_local_checkpoint_after_upload"] = False

    def main() -> None:
        kill_at(point, occurrence=FATAL_STEP + 1)
        fit(saving(tmp_path, **how), run_config, 0)

    with drivers(main) as driver:
        assert driver.wait() == -signal.SIGKILL, driver.communicate()
    done = COMMIT_POINTS.index(point) >= COMMIT_POINTS.index("commit.renamed")
    assert_intact(tmp_path / "run", newest=FATAL_STEP if done else FATAL_STEP - 1)
    assert_resumed(fit(saving(tmp_path), run_config, 0), num_workers=0)


@pytest.mark.usefixtures("ray_cluster")
def test_a_driver_killed_while_it_merges_two_ranks(
    run_config: RunConfig, tmp_path: Path, drivers: Drivers
) -> None:
    def main() -> None:
        kill_at("commit.merged", occurrence=FATAL_STEP + 1)
        fit(saving(tmp_path), run_config, 2)

    with drivers(main) as driver:
        assert driver.wait() == -signal.SIGKILL, driver.communicate()
    assert_intact(tmp_path / "run", newest=FATAL_STEP - 1)
    assert_resumed(fit(saving(tmp_path), run_config, 2), num_workers=2)


def sentinels_of(workers: set[str]) -> list[int]:
    """Wait until each worker has its sentinel; gives their pids, and that of one still forking."""
    while True:
        processes = psutil.process_iter(["cmdline"])
        lines = {process.pid: set(process.info["cmdline"] or []) for process in processes}
        found = {
            pid: line & workers
            for pid, line in lines.items()
            if any(part.endswith("/sentinel.py") for part in line) and line & workers
        }
        if set().union(*found.values()) == workers:
            return list(found)


@pytest.mark.usefixtures("ray_cluster")
def test_nothing_outlives_a_killed_driver(
    run_config: RunConfig,
    tmp_path: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
) -> None:
    def live_on() -> None:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        pipe.say(os.getpid(), child.pid)
        child.wait()

    with drivers(lambda: fit(saving(tmp_path, after=live_on), run_config, 2)) as driver:
        (worker_0, child_0), (worker_1, child_1) = pipe.hear(), pipe.hear()
        sentinels = sentinels_of({worker_0, worker_1})
        driver.kill()
        wait_until_gone([*map(int, (worker_0, worker_1, child_0, child_1)), *sentinels])
    assert_intact(tmp_path / "run", newest=FATAL_STEP)
    assert_resumed(fit(saving(tmp_path), run_config, 2), num_workers=2)
