"""Failures of workers in real processes: error messages, restarts, and clean-up."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.util import placement_group_table

from drawbar import train
from drawbar.train import (
    DataParallelTrainer,
    DivergenceError,
    InsufficientResourcesError,
    RunConfig,
    ScalingConfig,
    WorkerError,
    WorkerGroupError,
    collective,
)
from tests.train.runs import fit

pytestmark = pytest.mark.usefixtures("ray_cluster")


class TwoArguments(Exception):
    """Exception that can be pickled but not unpickled."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(a)


def test_worker_error_message_contains_rank_file_and_line(run_config: RunConfig) -> None:
    def function() -> None:
        if train.get_context().get_world_rank() == 1:
            raise TwoArguments("boom", "x")
        collective.barrier()

    with pytest.raises(WorkerGroupError) as raised:
        fit(function, run_config, num_workers=2)
    text = str(raised.value)
    line = function.__code__.co_firstlineno + 2
    assert text.startswith(f"rank 1: TwoArguments: boom ({__file__}:{line} in function)")
    assert isinstance(raised.value.worker_failures[1], WorkerError)
    assert "raise TwoArguments" in text


@pytest.mark.alone  # measures tenths of a second
def test_exception_with_unstoppable_peer_is_raised_immediately(
    run_config: RunConfig, tmp_path: Path
) -> None:
    def function() -> None:
        if train.get_context().get_world_rank() == 0:
            ctypes.CDLL(None).sleep(60)
        (tmp_path / "raised").write_text(repr(time.time()))
        raise ValueError("boom")

    with pytest.raises(WorkerGroupError) as raised:
        fit(function, run_config, num_workers=2)
    assert time.time() - float((tmp_path / "raised").read_text()) < 0.8
    assert isinstance(raised.value.worker_failures[1], ValueError)  # the type of the exception


@pytest.mark.alone  # measures tenths of a second
def test_exit_handlers_run_before_fit_returns_and_processes_end(
    run_config: RunConfig, tmp_path: Path, wait_until_gone: Callable[..., None]
) -> None:
    def function() -> int:
        def finish() -> None:
            time.sleep(0.3)
            (tmp_path / f"exited_{os.getpid()}").touch()

        atexit.register(finish)
        return os.getpid()

    pid = fit(function, run_config, num_workers=1).return_value
    assert (tmp_path / f"exited_{pid}").exists()
    wait_until_gone([pid], seconds=0.5)


def test_exit_handler_that_never_ends_is_killed(
    run_config: RunConfig, wait_until_gone: Callable[..., None]
) -> None:
    def function() -> int:
        atexit.register(threading.Event().wait)
        return os.getpid()

    wait_until_gone(fit(function, run_config, num_workers=1).return_values)


def test_process_whose_import_was_interrupted_is_replaced(
    run_config: RunConfig, tmp_path: Path
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    # A second import in the same process fails: `submodule` is not imported again.
    (package / "__init__.py").write_text("from package import submodule, slow\n")
    (package / "submodule.py").write_text("import package\npackage.attribute = 1\n")
    (package / "slow.py").write_text(
        f"import package, pathlib\npackage.attribute\nfolder = pathlib.Path({str(tmp_path)!r})\n"
        "if not (folder / 'was_killed').exists():\n    (folder / 'importing').write_text('')\n"
        "    while True:  # until the interrupt\n        pass\n"
    )

    os.mkfifo(tmp_path / "importing")

    def function() -> int:
        if train.get_context().get_world_rank() == 1 and not (tmp_path / "was_killed").exists():
            (tmp_path / "importing").read_text()  # waits for rank 0
            (tmp_path / "was_killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        sys.path.append(str(tmp_path))
        import package  # type: ignore[import-not-found]

        value: int = package.attribute
        return value

    result = fit(function, run_config, num_workers=2, max_failures=1)
    assert result.return_values == [1, 1]


def test_error_message_starts_with_earliest_failure_once(run_config: RunConfig) -> None:
    def function() -> None:
        rank = train.get_context().get_world_rank()
        if rank == 2:
            raise ValueError("the root")
        try:
            collective.barrier()
        except BaseException:
            raise ConnectionResetError("lost a peer") from None

    with pytest.raises(WorkerGroupError) as raised:
        fit(function, run_config, num_workers=4, in_threads=True)
    assert raised.value.failures[0].message == "the root"
    assert str(raised.value).startswith("rank 2: ValueError: the root")
    assert str(raised.value).count("raise ValueError") == 1


@pytest.mark.parametrize(
    ("die", "cause"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "SIGTERM"),
        (lambda: ctypes.string_at(0), "SIGSEGV"),
    ],
)
def test_worker_death_names_the_cause(run_config: RunConfig, die: Any, cause: str) -> None:
    with pytest.raises(WorkerGroupError) as raised:
        fit(lambda: die(), run_config, num_workers=1)
    assert "rank 0: worker process died" in str(raised.value)
    assert cause in str(raised.value)
    if cause == "SIGSEGV":
        _, crashed, *others = raised.value.failures[0].message.split("\n\n")
        assert crashed.startswith("Current thread")
        assert "string_at" in crashed
        assert others


def test_divergence_of_rank_returning_without_report_is_named(run_config: RunConfig) -> None:
    def function() -> None:
        if train.get_context().get_world_rank() == 0:
            with train.checkpoint_dir() as path:
                (path / "model").write_text("m")
                train.report({}, checkpoint=path)

    start_time = time.monotonic()
    with pytest.raises(DivergenceError) as raised:
        fit(function, run_config, num_workers=2)
    assert time.monotonic() - start_time < 60
    line = function.__code__.co_firstlineno + 4
    assert "rank 1 finished after 0 reports" in str(raised.value)
    assert f"rank 0 waits for report #0 with a checkpoint at {__file__}:{line}" in str(raised.value)


def test_divergence_of_barrier_and_broadcast_is_named(run_config: RunConfig) -> None:
    def function() -> None:
        if train.get_context().get_world_rank() == 0:
            collective.barrier()
        else:
            collective.broadcast_from_rank_zero(1)

    with pytest.raises(DivergenceError) as raised:
        fit(function, run_config, num_workers=2, in_threads=True, max_failures=5)
    assert "(barrier)" in str(raised.value)
    assert "(broadcast_from_rank_zero)" in str(raised.value)


def test_divergence_of_checkpoint_names_contains_both_lines(run_config: RunConfig) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            name = f"by_{train.get_context().get_world_rank()}"
            train.report({}, checkpoint=path, checkpoint_dir_name=name)

    with pytest.raises(DivergenceError) as raised:
        fit(function, run_config, num_workers=2, in_threads=True, max_failures=5)
    location = f"(report #0 at {__file__}:{function.__code__.co_firstlineno + 4} in function)"
    reason = f"rank 0 {location} names the checkpoint 'by_0', rank 1 {location} names it 'by_1'"
    assert reason in str(raised.value)


def test_worker_log_that_cannot_be_written_fails_the_run(
    run_config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "run" / "logs" / "rank_0.log").mkdir(parents=True)
    with pytest.raises(WorkerGroupError, match=r"IsADirectoryError: .*/run/logs/rank_0\.log"):
        fit(lambda: None, run_config, num_workers=1)


def test_worker_that_cannot_handle_a_command_is_restarted(run_config: RunConfig) -> None:
    def function() -> int:
        context = train.get_context()
        if (context.get_attempt(), context.get_world_rank()) == (0, 1):
            train.report({})
            # The command after a commit needs this method. The successor has a new process.
            delattr(train.Checkpoint, "from_storage_path")
            while True:
                threading.Event().wait(0.01)
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report({}, checkpoint=path)
        return context.get_attempt()

    result = fit(function, run_config, num_workers=2, max_failures=1)
    assert result.return_values == [1, 1]
    assert "from_storage_path" in result.timeline.attempts[0].outcome


def test_reports_without_checkpoints_do_not_wait_for_other_ranks(run_config: RunConfig) -> None:
    def function() -> None:
        if train.get_context().get_world_rank() == 1:
            for step in range(100):
                train.report({"step": step})

    result = fit(function, run_config, num_workers=2, in_threads=True)
    assert result.metrics == {"step": 99}
    assert len(result.metrics_dataframe) == 100


def test_restart_after_sigkill_resumes_from_latest_checkpoint(run_config: RunConfig) -> None:
    def function() -> int:
        checkpoint = train.get_checkpoint()
        first = int((Path(checkpoint) / "step").read_text()) + 1 if checkpoint else 0
        for step in range(first, 5):
            with train.checkpoint_dir() as path:
                if train.get_context().get_world_rank() == 0:
                    (path / "step").write_text(str(step))
                train.report({"step": step}, checkpoint=path)
            if step == 2 and first == 0 and train.get_context().get_world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            collective.barrier()
        return first

    result = fit(function, run_config, num_workers=2, max_failures=1)
    assert result.return_values == [3, 3]
    frame = result.metrics_dataframe
    for rank in (0, 1):
        assert list(frame[frame["rank"] == rank]["step"]) == [0, 1, 2, 3, 4]
    assert [attempt.outcome.split(":")[0] for attempt in result.timeline.attempts] == [
        "failed",
        "finished",
    ]


@pytest.mark.parametrize("reuse", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_restart_keeps_process_and_cache_of_survivors(run_config: RunConfig, reuse: bool) -> None:
    def function() -> tuple[bool, int]:
        context = train.get_context()
        is_cached = "loaded" in context.cache
        context.cache["loaded"] = True
        collective.barrier()
        if context.get_attempt() == 0 and context.get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        collective.barrier()
        return is_cached, context.get_attempt()

    result = fit(function, run_config, num_workers=2, max_failures=1, reuse_workers=reuse)
    assert result.return_values == [(reuse, 1), (False, 1)]


def test_restart_replaces_survivor_that_does_not_stop(
    run_config: RunConfig, tmp_path: Path
) -> None:
    in_c = tmp_path / "in_c"

    def function() -> bool:
        context = train.get_context()
        is_cached = "loaded" in context.cache
        context.cache["loaded"] = True
        collective.barrier()
        if context.get_attempt() == 0:
            if context.get_world_rank() == 0:
                # An interrupt never arrives in one long C call. The shell ends with its parent.
                ctypes.CDLL(None).system(
                    f"touch {in_c}; while kill -0 $PPID; do sleep 0.1; done".encode()
                )
            while not in_c.exists():
                pass
            raise ValueError("once")
        return is_cached

    # By default, the rank that raises gets another process, too.
    result = fit(function, run_config, num_workers=2, max_failures=1, stop_when_deterministic=False)
    assert result.return_values == [False, True]


def test_max_failures_limits_the_number_of_attempts(run_config: RunConfig, tmp_path: Path) -> None:
    def function() -> None:
        (tmp_path / f"attempt_{train.get_context().get_attempt()}").touch()
        raise ValueError("always")

    with pytest.raises(WorkerGroupError, match="max_failures=2 is used up"):
        fit(function, run_config, max_failures=2)
    assert len(list(tmp_path.glob("attempt_*"))) == 3


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (ScalingConfig(resources_per_worker={"CPU": 50}), "largest node"),
        (ScalingConfig(num_workers=9), "8"),
        (ScalingConfig(resources_per_worker={"unobtainium": 1}), "unobtainium"),
        (ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"), "STRICT_SPREAD"),
    ],
)
def test_fit_with_unavailable_resources_raises_immediately(
    run_config: RunConfig, scaling: ScalingConfig, message: str
) -> None:
    start_time = time.monotonic()
    with pytest.raises(InsufficientResourcesError, match=message):
        DataParallelTrainer(lambda: None, scaling_config=scaling, run_config=run_config).fit()
    assert time.monotonic() - start_time < 20  # waiting for the resources would take forever


def list_placement_groups() -> set[str]:
    table = placement_group_table()
    return {name for name, group in table.items() if group["state"] != "REMOVED"}


def test_fit_leaves_no_processes_or_placement_groups(run_config: RunConfig) -> None:
    before = list_placement_groups()
    result = fit(os.getpid, run_config, num_workers=2)
    workers = [psutil.Process(pid) for pid in result.return_values if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert not alive
    assert list_placement_groups() <= before
