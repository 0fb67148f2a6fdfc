"""A run that stands still says who stands where, on any backend, and on demand."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from drawbar import train
from drawbar.train import (
    DataParallelTrainer,
    FailureConfig,
    HangError,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
    collective,
)
from drawbar.train._controller.diagnosis import format_difference
from drawbar.train._controller.progress import RankActivity
from drawbar.train._controller.stall_detector import Stacks, find_stalled_ranks
from drawbar.train._worker.stack import Frame, Stack
from drawbar.train._worker.user_frames import find_user_frames

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.alone,  # ranks that wait for a core for a second or two would count as standing
]


def trainer(function: object, config: RunConfig, **failure: object) -> DataParallelTrainer:
    return DataParallelTrainer(
        function,  # type: ignore[arg-type]  # local functions of any shape
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=config.name,
            storage_path=config.storage_path,
            failure_config=FailureConfig(**failure),  # type: ignore[arg-type]
        ),
    )


def test_a_hang_names_the_odd_rank_out(run_config: RunConfig, tmp_path: Path) -> None:
    def function() -> None:
        if train.get_context().get_world_rank() == 1:
            threading.Event().wait()
        collective.barrier()

    with pytest.raises(HangError) as raised:
        trainer(function, run_config, hang_timeout=2).fit()
    first = function.__code__.co_firstlineno
    assert "no rank made progress for 2 s" in str(raised.value)
    assert f"rank 0: {__file__}:{first + 3} in function" in str(raised.value)
    assert f"rank 1: {__file__}:{first + 2} in function" in str(raised.value)
    stacks = sorted(path.name for path in (tmp_path / "run" / "stacks" / "hang_0").iterdir())
    assert stacks == ["difference.txt", "rank_0.txt", "rank_1.txt"]


def test_a_hang_counts_as_a_failure_and_is_tried_again(run_config: RunConfig) -> None:
    def function() -> int:
        attempt = train.get_context().get_attempt()
        if attempt == 0:
            threading.Event().wait()
        return attempt

    result = trainer(function, run_config, hang_timeout=1, max_failures=1).fit()
    assert result.return_values == [1, 1]


def test_a_rank_can_ask_where_all_stand(run_config: RunConfig, tmp_path: Path) -> None:
    def function() -> str:
        said = ""
        if train.get_context().get_world_rank() == 0:
            said = train.get_context().diagnose()
        collective.barrier()
        return said

    result = trainer(function, run_config).fit()
    assert "rank 0: " in result.return_values[0]
    assert "rank 1: " in result.return_values[0]
    assert len(list((tmp_path / "run" / "stacks").glob("diagnosis_*/rank_*.txt"))) == 2


def test_a_signal_to_the_driver_writes_the_same(run_config: RunConfig, tmp_path: Path) -> None:
    driver = os.getpid()

    def function() -> None:
        if train.get_context().get_world_rank() == 0:
            os.kill(driver, signal.SIGUSR1)
        stacks = train.get_context().get_storage() / "stacks"
        while not any(collective.all_gather(list(stacks.glob("diagnosis_*/difference.txt")))):
            pass

    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # a sweep of Ray Tune leaves a handler there
    trainer(function, run_config).fit()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def wait_in_c() -> None:
    ctypes.PyDLL(None).sleep(60)  # holds the interpreter


def wait_for_a_child() -> None:
    subprocess.run(["sleep", "60"], check=False)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        (wait_in_c, "it does not answer: it is frozen, or in one long call"),
        (wait_for_a_child, "in wait_for_a_child, inside "),
        (freeze, "it is stopped (state T): kill -CONT "),
    ],
)
def test_a_rank_that_others_wait_for_is_said_to_be_quiet(
    run_config: RunConfig,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    stop: Callable[[], None],
    told: str,
) -> None:
    def function() -> None:
        train.report({"step": 0})
        if train.get_context().get_world_rank() == 1:
            (tmp_path / "pid").write_text(str(os.getpid()))
            stop()
        collective.barrier()

    run = trainer(function, run_config, stall_warning_after=1).start()
    while not (quiet := run.stalled_ranks):
        assert not run.is_done
    assert list(quiet) == [1]
    assert "rank 1 gives no sign of life for" in quiet[1]
    assert "while rank 0 waits in collective #0 (barrier)" in quiet[1]
    assert told in quiet[1]
    assert "stalled ranks 1" in repr(run)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    with pytest.raises(WorkerGroupError):
        run.wait()
    assert capfd.readouterr().err.count(quiet[1]) == 1


def test_a_rank_that_speaks_again_is_quiet_no_more(
    run_config: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> None:
        while train.get_context().get_world_rank() == 1 and not (tmp_path / "go_on").exists():
            threading.Event().wait(0.01)
        collective.barrier()
        while not (tmp_path / "end").exists():
            collective.barrier()

    run = trainer(function, run_config, stall_warning_after=1).start()
    while not run.stalled_ranks:
        assert not run.is_done
    (tmp_path / "go_on").touch()
    while run.stalled_ranks:
        assert not run.is_done
    (tmp_path / "end").touch()
    run.stop(save=False)
    run.wait()
    assert "all ranks give signs of life again" in capfd.readouterr().err


HERE = Stack(frames=(Frame("/home/me/train.py", 10, "step"),), text="")
THERE = Stack(frames=(Frame("/home/me/train.py", 12, "step"),), text="")
STOPPED = Stack(text="", stopped_reason="stopped (state T): kill -CONT 7 on node")


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({0: HERE, 1: HERE}, {0: HERE, 1: HERE}, []),  # both compute, or both wait
        ({0: HERE, 1: HERE}, {0: HERE, 1: THERE}, []),  # one moves
        ({0: HERE, 1: None}, {0: THERE, 1: None}, [1]),
        ({0: HERE, 1: None}, {0: THERE, 1: STOPPED}, [1]),
        ({0: HERE, 1: THERE, 2: HERE}, {0: HERE, 1: THERE, 2: HERE}, [1]),
        ({0: HERE, 1: THERE}, {0: HERE, 1: THERE}, [0, 1]),
    ],
)
def test_when_all_are_silent_those_that_do_not_move_and_stand_apart_are_quiet(
    before: Stacks, now: Stacks, found: list[int]
) -> None:
    assert list(find_stalled_ranks(dict.fromkeys(now, RankActivity(31)), 30, before, now)) == found
    talking = {**dict.fromkeys(now, RankActivity(31)), 0: RankActivity(1)}
    assert find_stalled_ranks(talking, 30, before, now) == {}


def test_the_smaller_group_is_the_odd_one_out() -> None:
    def at(line: int) -> Stack:
        return Stack(frames=(Frame("/home/me/train.py", line, "step"),), text="")

    told = format_difference({0: at(10), 1: at(12), 2: at(10), 3: None})
    assert told.splitlines()[-1] == "  ranks 0, 2 (2): /home/me/train.py:10 in step"
    assert "rank 1: /home/me/train.py:12 in step" in told
    assert "rank 3: does not answer" in told


def test_users_lines_exclude_files_of_drawbar() -> None:
    # Found and not imported: workers import this module too.
    specs = [importlib.util.find_spec(f"drawbar.{name}") for name in ("train", "torch")]
    own = [spec.origin for spec in specs if spec is not None and spec.origin]
    assert len(own) == 2
    libraries = [*own, threading.__file__, "<frozen os>"]
    assert find_user_frames([*libraries, "/home/me/train.py", *libraries]) == [len(libraries)]
    assert find_user_frames(libraries) == []
