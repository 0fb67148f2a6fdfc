"""Detached runs and `attach`: runs that continue without the driver that started them."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import ray
from ray.exceptions import WorkerCrashedError
from ray.util.placement_group import placement_group_table

from drawbar import train
from drawbar.train import (
    Checkpoint,
    ControllerError,
    DataParallelTrainer,
    RunConfig,
    RunHandle,
    ScalingConfig,
    UserAbort,
    UserCallback,
    ValidationConfig,
    WorkerGroupError,
)

if TYPE_CHECKING:
    from tests.train.conftest import Drivers, Pipe

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


class SendsHostPid(UserCallback):
    """Send the PID of the host of the run after the first report."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def after_report(self, *_: Any) -> None:
        self._pipe.send("host", os.getpid())


class SendsPidWhenUnpickled:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def __reduce__(self) -> Any:
        return self._unpickle, (self._pipe,)

    @staticmethod
    def _unpickle(pipe: Pipe) -> SendsPidWhenUnpickled:
        pipe.send("unpickled", os.getpid())
        return SendsPidWhenUnpickled(pipe)


class KillsDriverWhenPickled(UserCallback):
    """Kill the process that pickles this object if the run already has a host actor."""

    def __reduce__(self) -> Any:
        with suppress(ValueError):  # there is no host actor yet
            host: Any = ray.get_actor("run", namespace="drawbar")
            ray.get(host.has_ended.remote())  # wait until it is ready
            os.kill(os.getpid(), signal.SIGKILL)
        return KillsDriverWhenPickled, ()


class UserError(Exception):
    """A user-defined exception."""


@pytest.fixture(autouse=True)
def _kill_remaining_hosts(ray_cluster: None) -> Iterator[None]:
    yield
    for actor in ray.util.list_named_actors(all_namespaces=True):
        with suppress(ValueError):  # it has ended in the meantime
            ray.kill(ray.get_actor(**actor))


@pytest.fixture
def finish_file(tmp_path: Path) -> Path:
    """Path of the file for which `train_until` waits."""
    return tmp_path / "finish_file"


def train_until(finish_file: Path, pipe: Pipe, *, fails: bool = False) -> Callable[[], str]:
    """Return a function that saves a step and waits. A second attempt resumes from that step."""

    def function() -> str:
        context, checkpoint = train.get_context(), train.get_checkpoint()
        if checkpoint is None:
            with train.checkpoint_dir() as path:
                (path / "step").write_text("0")
                train.report({"step": 0}, checkpoint=path)
        train.set_progress(1, total=2)
        pipe.send("worker", os.getpid())
        while not finish_file.exists():
            threading.Event().wait(0.01)
        if fails:
            raise UserError("boom")
        start = "from scratch" if checkpoint is None else "from a checkpoint"
        return f"rank {context.get_world_rank()} {start}"

    return function


def trainer(
    function: Callable[[], Any],
    storage: Path,
    *callbacks: UserCallback,
    num_workers: int = 1,
    validation_config: ValidationConfig | None = None,
) -> DataParallelTrainer:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name="run", storage_path=storage, callbacks=callbacks, detached=True),
        validation_config=validation_config,
    )


def receive_pids(pipe: Pipe, **counts: int) -> dict[str, set[int]]:
    """Wait for a number of different PIDs of each kind and return all received ones."""
    pids: dict[str, set[int]] = {kind: set() for kind in counts}
    while any(len(pids[kind]) < count for kind, count in counts.items()):
        kind, pid = pipe.receive()
        pids.setdefault(kind, set()).add(int(pid))
    return pids


def assert_no_orphans() -> None:
    states = {group["state"] for group in placement_group_table().values()}
    assert states <= {"REMOVED"}
    named = ray.util.list_named_actors(all_namespaces=True)
    assert [actor for actor in named if actor["namespace"] == "drawbar"] == []


def assert_cannot_be_started(function: Callable[[], str], storage: Path) -> None:
    """Check that the run in progress can be started neither detached nor in this process."""
    with pytest.raises(RuntimeError, match=r"a detached run 'run' is in progress.*attach\('run'"):
        trainer(function, storage).start()
    with pytest.raises(RuntimeError, match="is in use by a run in another process"):
        DataParallelTrainer(
            function,
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(name="run", storage_path=storage),
        ).fit()


def assert_waits_after_first_step(run: RunHandle) -> None:
    """Check the state of a run of `train_until`, whose handle shows the progress soon."""
    assert isinstance(run, RunHandle)
    assert (run.status, run.metrics, run.is_done) == ("running", {"step": 0}, False)
    assert 0 < run.goodput().productive <= run.goodput().hosted
    while run.progress is None:
        threading.Event().wait(0.01)
    assert run.progress.percent == 50


def test_detached_run_after_driver_sigkill_continues(
    tmp_path: Path,
    finish_file: Path,
    drivers: Drivers,
    pipe: Pipe,
    capfd: pytest.CaptureFixture[str],
    wait_until_gone: Callable[..., None],
) -> None:
    function = train_until(finish_file, pipe)
    witness = SendsPidWhenUnpickled(pipe)
    callback = SendsHostPid(pipe)

    def with_witness() -> str:
        assert witness
        return function()

    with drivers(lambda: trainer(with_witness, tmp_path, callback, num_workers=2).fit()) as driver:
        pids = receive_pids(pipe, worker=2, host=1)
        driver.kill()
        driver.wait()
    drivers.run(lambda: assert_cannot_be_started(function, tmp_path))
    assert not pids["host"] & pids["unpickled"]

    run = train.attach("run")
    assert_waits_after_first_step(run)
    assert train.attach(tmp_path / "run").metrics == {"step": 0}
    with pytest.raises(
        LookupError, match=r"no detached run 'other' is in progress.*runs in progress: run$"
    ):
        train.attach("other")
    finish_file.touch()
    result = run.wait()
    assert result.return_values == ["rank 0 from scratch", "rank 1 from scratch"]
    assert result.checkpoint is not None
    assert run.goodput() == result.goodput
    err = capfd.readouterr().err
    assert "[drawbar 00:00] finished" in err
    assert err.count("finished") == 1  # although this process has two handles
    wait_until_gone(pids["worker"] | pids["host"])
    assert_no_orphans()

    attached = train.attach(tmp_path / "run")
    assert (attached.status, attached.is_done) == ("finished", True)
    assert attached.wait().return_values == result.return_values


class WaitsForFile(UserCallback):
    """Block the end of a run until a file exists."""

    def __init__(self, finish_file: Path) -> None:
        self._go_on = finish_file

    def after_report(self, *_: Any) -> None:
        while not self._go_on.exists():
            threading.Event().wait(0.01)


def test_detached_run_with_waiting_callback_is_not_done(
    tmp_path: Path,
    finish_file: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
) -> None:
    def function() -> str:
        train.report({"step": 0})
        pipe.send("worker", os.getpid())
        return "returned"

    with drivers(lambda: trainer(function, tmp_path, WaitsForFile(finish_file)).fit()):
        wait_until_gone(receive_pids(pipe, worker=1)["worker"], seconds=60)
        run = train.attach(tmp_path / "run")
        assert (run.status, run.is_done) == ("finished", False)
        finish_file.touch()
        assert run.wait().return_values == ["returned"]


def test_attach_by_name_prefers_detached_run_in_progress(
    tmp_path: Path,
    finish_file: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function, callback = train_until(finish_file, pipe), SendsHostPid(pipe)
    with drivers(lambda: trainer(function, tmp_path / "elsewhere", callback).fit()):
        pids = receive_pids(pipe, worker=1, host=1)
        monkeypatch.setenv("HOME", str(tmp_path))  # where the default storage path is
        DataParallelTrainer(
            lambda: train.report({"step": -1}),
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="run"),
        ).fit()
        run = train.attach("run")
        assert (run.is_done, run.path) == (False, str(tmp_path / "elsewhere" / "run"))
        finish_file.touch()
        wait_until_gone(pids["host"], seconds=60)
    assert train.attach("run").metrics == {"step": -1}


@pytest.mark.nightly
def test_detached_validation_after_driver_sigkill_completes(
    tmp_path: Path, finish_file: Path, drivers: Drivers, pipe: Pipe
) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "step").write_text("0")
            train.report({"step": 0}, checkpoint=path, validation=True)

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        pipe.send("validation", os.getpid())
        while not finish_file.exists():
            threading.Event().wait(0.01)
        return {"next": int((Path(checkpoint) / "step").read_text()) + 1}

    def main() -> None:
        trainer(function, tmp_path, validation_config=ValidationConfig(validate)).fit()

    with drivers(main) as driver:
        receive_pids(pipe, validation=1)
        driver.kill()
        driver.wait()
    run = train.attach("run")
    finish_file.touch()
    ((_, metrics),) = run.wait().best_checkpoints
    assert metrics == {"step": 0, "next": 1}


def test_attach_to_failed_run_raises_its_error_and_frees_name(
    tmp_path: Path, finish_file: Path, drivers: Drivers, pipe: Pipe
) -> None:
    function = train_until(finish_file, pipe, fails=True)

    def main() -> None:
        for _ in range(2):
            with pytest.raises(WorkerGroupError, match="UserError: boom") as raised:
                trainer(function, tmp_path).fit()
            first, *_ = raised.value.worker_failures.values()
            assert type(first).__name__ == "UserError"

    finish_file.touch()
    drivers.run(main)
    run = train.attach(tmp_path / "run")
    assert run.status == "failed"
    with pytest.raises(WorkerGroupError, match="UserError: boom") as raised:
        run.wait()
    first, *_ = raised.value.worker_failures.values()
    assert isinstance(first, UserError)


def test_driver_sigkill_before_start_leaves_no_detached_run(tmp_path: Path) -> None:
    def drive(is_killed: bool) -> Any:
        callbacks = [KillsDriverWhenPickled()] if is_killed else []
        return trainer(lambda: 7, tmp_path, *callbacks).fit().return_values

    driver: Any = ray.remote(num_cpus=0, max_retries=0)(drive)
    with pytest.raises(WorkerCrashedError):
        ray.get(driver.remote(is_killed=True))
    start_time = time.monotonic()
    with pytest.raises(LookupError, match="contains no ended run"):
        train.attach(tmp_path / "run")
    assert time.monotonic() - start_time < 30
    with pytest.raises(WorkerCrashedError):
        ray.get(driver.remote(is_killed=True))
    assert ray.get(driver.remote(is_killed=False)) == [7]


def test_ctrl_c_during_detached_fit_only_detaches(
    tmp_path: Path,
    finish_file: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
) -> None:
    function = train_until(finish_file, pipe)

    def main() -> None:
        with pytest.raises(UserAbort) as abort:
            trainer(function, tmp_path).fit()
        print(abort.value)

    with drivers(main) as driver:
        pids = receive_pids(pipe, worker=1)["worker"]
        driver.send_signal(signal.SIGINT)
        out, err = driver.communicate(timeout=300)
    assert driver.returncode == 0, err
    assert "no longer waiting for the detached run 'run', which continues" in out
    run = train.attach("run")
    assert run.status == "running"
    run.stop(save=False)
    assert run.wait(timeout=300).metrics == {"step": 0}
    assert run.status == "stopped"
    wait_until_gone(pids)


@pytest.mark.nightly
def test_suspended_host_raises_timeout_error_with_its_pid(
    tmp_path: Path,
    finish_file: Path,
    drivers: Drivers,
    pipe: Pipe,
    capfd: pytest.CaptureFixture[str],
) -> None:
    function, callback = train_until(finish_file, pipe), SendsHostPid(pipe)

    def second_fit() -> None:
        with pytest.raises(TimeoutError, match=unresponsive):
            trainer(function, tmp_path).fit()

    with drivers(lambda: trainer(function, tmp_path, callback).fit()):
        (host,) = receive_pids(pipe, worker=1, host=1)["host"]
    run = train.attach("run")
    unresponsive = (
        rf"the process that hosts run 'run' does not reply \(pid {host} on node .*kill -9"
    )
    calls: list[Callable[[], Any]] = [
        lambda: run.status,
        run.stop,
        lambda: train.attach("run"),
        lambda: train.attach(tmp_path / "run"),
    ]
    os.kill(host, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor() as pool:
            futures = [pool.submit(call) for call in calls]
            with pytest.raises(TimeoutError, match=r"after 1 s run 'run' in .* has not ended"):
                run.wait(timeout=1)
            assert "host does not reply" in repr(run)
            for future in futures:
                with pytest.raises(TimeoutError, match=unresponsive):
                    future.result(timeout=300)
        drivers.run(second_fit)
        with pytest.raises(TimeoutError, match=unresponsive):
            run.wait(timeout=1)
    finally:
        os.kill(host, signal.SIGCONT)
    finish_file.touch()
    run.wait(timeout=300)
    assert f"(pid {host} on node" in capfd.readouterr().err


def test_detached_run_after_host_sigkill_fails_and_resumes(
    tmp_path: Path,
    finish_file: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
) -> None:
    function = train_until(finish_file, pipe)
    callback = SendsHostPid(pipe)

    def main() -> None:
        run = trainer(function, tmp_path, callback).start()
        with pytest.raises(ControllerError, match="hosts the run no longer replies"):
            run.wait()
        assert (run.status, run.metrics) == ("failed", {"step": 0})
        pipe.send("raised", 0)

    def again() -> None:
        result = trainer(function, tmp_path).fit()
        assert result.return_values == ["rank 0 from a checkpoint"]

    with drivers(main):
        pids = receive_pids(pipe, worker=1, host=1)
        os.kill(pids["host"].pop(), signal.SIGKILL)
        wait_until_gone(pids["worker"])
        receive_pids(pipe, raised=1)
    assert_no_orphans()
    with pytest.raises(
        LookupError, match=r'has not ended.*host process died.*fit\(\) with resume="auto"'
    ):
        train.attach(tmp_path / "run")
    finish_file.touch()
    drivers.run(again)


def test_detached_with_zero_workers_or_own_ray_is_reported(
    run_config: RunConfig, tmp_path: Path
) -> None:
    config = RunConfig(name="run", storage_path=tmp_path, detached=True)
    local = DataParallelTrainer(
        print, scaling_config=ScalingConfig(num_workers=0), run_config=config
    )
    with pytest.raises(ValueError, match=r"detached=True needs workers.*num_workers=0"):
        local.fit()
    with pytest.warns(UserWarning, match="has started its own Ray, which ends with it"):
        trainer(lambda: None, tmp_path).fit()
    with pytest.raises(TypeError, match=re.escape("RunConfig.detached")):
        RunConfig(detached="yes")  # type: ignore[arg-type]


def test_attach_to_run_in_another_driver_works_by_path(
    tmp_path: Path, finish_file: Path, drivers: Drivers, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = train_until(finish_file, pipe)

    def main() -> None:
        config = RunConfig(name="run", storage_path=tmp_path)
        DataParallelTrainer(
            function, scaling_config=ScalingConfig(num_workers=1), run_config=config
        ).fit()

    with drivers(main) as driver:
        receive_pids(pipe, worker=1)
        run = train.attach(tmp_path / "run")
        assert (run.name, run.status, run.is_done) == ("run", "running", False)
        # The worker may still be in `say`, in the conftest.py of these tests.
        assert f": {Path(__file__).parents[1]}" in run.diagnose()
        with pytest.raises(TimeoutError, match="it continues"):
            run.wait(0)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(tempfile, "tempdir", str(tmp_path))
            with pytest.raises(LookupError, match="driver of another user or machine"):
                train.attach(tmp_path / "run")
        run.stop(save=False)
        assert run.wait(300).error is None
        assert run.status == "stopped"
        driver.wait(300)
    assert driver.returncode == 0
