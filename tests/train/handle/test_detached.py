"""`RunConfig(detached=True)` and `attach`: runs that outlive the driver that started them."""

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


class TellsItsProcess(UserCallback):
    """Says which process hosts the run, once its ranks have reported."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def after_report(self, *_: Any) -> None:
        self._pipe.say("host", os.getpid())


class TellsWhereItIsUnpickled:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def __reduce__(self) -> Any:
        return self._unpickle, (self._pipe,)

    @staticmethod
    def _unpickle(pipe: Pipe) -> TellsWhereItIsUnpickled:
        pipe.say("unpickled", os.getpid())
        return TellsWhereItIsUnpickled(pipe)


class EndsItsDriver(UserCallback):
    """Kills the process that packs it, when there is an actor for the run already."""

    def __reduce__(self) -> Any:
        with suppress(ValueError):  # there is none yet
            host: Any = ray.get_actor("run", namespace="drawbar")
            ray.get(host.has_ended.remote())  # it is up
            os.kill(os.getpid(), signal.SIGKILL)
        return EndsItsDriver, ()


class Lesson(Exception):
    """An exception of the user's."""


@pytest.fixture(autouse=True)
def _no_run_is_left(ray_cluster: None) -> Iterator[None]:
    yield
    for actor in ray.util.list_named_actors(all_namespaces=True):
        with suppress(ValueError):  # it has ended meanwhile
            ray.kill(ray.get_actor(**actor))


@pytest.fixture
def go_on(tmp_path: Path) -> Path:
    """The file for which `train_until` waits."""
    return tmp_path / "go_on"


def train_until(go_on: Path, pipe: Pipe, *, fails: bool = False) -> Callable[[], str]:
    """Make a function that saves a step, then waits; a second attempt goes on from that step."""

    def function() -> str:
        context, checkpoint = train.get_context(), train.get_checkpoint()
        if checkpoint is None:
            with train.checkpoint_dir() as path:
                (path / "step").write_text("0")
                train.report({"step": 0}, checkpoint=path)
        pipe.say("worker", os.getpid())
        while not go_on.exists():
            threading.Event().wait(0.01)
        if fails:
            raise Lesson("learned")
        began = "anew" if checkpoint is None else "from a checkpoint"
        return f"rank {context.get_world_rank()} {began}"

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


def hear_pids(pipe: Pipe, **wanted: int) -> dict[str, set[int]]:
    """Wait until so many processes of each kind have spoken; gives all that have."""
    heard: dict[str, set[int]] = {kind: set() for kind in wanted}
    while any(len(heard[kind]) < count for kind, count in wanted.items()):
        kind, pid = pipe.hear()
        heard.setdefault(kind, set()).add(int(pid))
    return heard


def assert_nothing_is_left() -> None:
    states = {group["state"] for group in placement_group_table().values()}
    assert states <= {"REMOVED"}
    named = ray.util.list_named_actors(all_namespaces=True)
    assert [actor for actor in named if actor["namespace"] == "drawbar"] == []


def test_a_run_outlives_its_driver_and_is_found_again(
    tmp_path: Path,
    go_on: Path,
    drivers: Drivers,
    pipe: Pipe,
    capfd: pytest.CaptureFixture[str],
    wait_until_gone: Callable[..., None],
) -> None:
    function = train_until(go_on, pipe)
    witness = TellsWhereItIsUnpickled(pipe)
    callback = TellsItsProcess(pipe)

    def with_a_witness() -> str:
        assert witness
        return function()

    def other_start() -> None:
        with pytest.raises(RuntimeError, match=r"a detached run 'run' is going on.*attach\('run'"):
            trainer(function, tmp_path).start()
        with pytest.raises(RuntimeError, match="is in use by a run in another process"):
            DataParallelTrainer(
                function,
                scaling_config=ScalingConfig(num_workers=1),
                run_config=RunConfig(name="run", storage_path=tmp_path),
            ).fit()

    with drivers(
        lambda: trainer(with_a_witness, tmp_path, callback, num_workers=2).fit()
    ) as driver:
        pids = hear_pids(pipe, worker=2, host=1)
        driver.kill()
        driver.wait()
    drivers.run(other_start)
    assert not pids["host"] & pids["unpickled"]

    run = train.attach("run")
    assert isinstance(run, RunHandle)
    assert (run.status, run.metrics, run.is_done) == ("running", {"step": 0}, False)
    assert train.attach(tmp_path / "run").metrics == {"step": 0}
    with pytest.raises(LookupError, match=r"no detached run 'other' goes on.*go on: run$"):
        train.attach("other")
    go_on.touch()
    result = run.wait()
    assert result.return_values == ["rank 0 anew", "rank 1 anew"]
    assert result.checkpoint is not None
    told = capfd.readouterr().err
    assert "[drawbar 00:00] finished" in told
    assert told.count("finished") == 1  # though there are two handles on it here
    wait_until_gone(pids["worker"] | pids["host"])
    assert_nothing_is_left()

    afterwards = train.attach(tmp_path / "run")
    assert (afterwards.status, afterwards.is_done) == ("finished", True)
    assert afterwards.wait().return_values == result.return_values


class Waits(UserCallback):
    """Holds up the end of the run that it watches."""

    def __init__(self, go_on: Path) -> None:
        self._go_on = go_on

    def after_report(self, *_: Any) -> None:
        while not self._go_on.exists():
            threading.Event().wait(0.01)


def test_a_run_whose_host_has_not_told_its_ending_is_not_over(
    tmp_path: Path,
    go_on: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
) -> None:
    def function() -> str:
        train.report({"step": 0})
        pipe.say("worker", os.getpid())
        return "returned"

    with drivers(lambda: trainer(function, tmp_path, Waits(go_on)).fit()):
        wait_until_gone(hear_pids(pipe, worker=1)["worker"], seconds=60)
        run = train.attach(tmp_path / "run")
        assert (run.status, run.is_done) == ("finished", False)
        go_on.touch()
        assert run.wait().return_values == ["returned"]


def test_a_name_is_that_of_the_run_which_goes_on(
    tmp_path: Path,
    go_on: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function, callback = train_until(go_on, pipe), TellsItsProcess(pipe)
    with drivers(lambda: trainer(function, tmp_path / "elsewhere", callback).fit()):
        pids = hear_pids(pipe, worker=1, host=1)
        monkeypatch.setenv("HOME", str(tmp_path))  # where the default storage path is
        DataParallelTrainer(
            lambda: train.report({"step": -1}),
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="run"),
        ).fit()
        run = train.attach("run")
        assert (run.is_done, run.path) == (False, str(tmp_path / "elsewhere" / "run"))
        go_on.touch()
        wait_until_gone(pids["host"], seconds=60)
    assert train.attach("run").metrics == {"step": -1}


def test_a_validation_goes_on_without_the_driver(
    tmp_path: Path, go_on: Path, drivers: Drivers, pipe: Pipe
) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "step").write_text("0")
            train.report({"step": 0}, checkpoint=path, validation=True)

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        pipe.say("validation", os.getpid())
        while not go_on.exists():
            threading.Event().wait(0.01)
        return {"next": int((Path(checkpoint) / "step").read_text()) + 1}

    def main() -> None:
        trainer(function, tmp_path, validation_config=ValidationConfig(validate)).fit()

    with drivers(main) as driver:
        hear_pids(pipe, validation=1)
        driver.kill()
        driver.wait()
    run = train.attach("run")
    go_on.touch()
    ((_, metrics),) = run.wait().best_checkpoints
    assert metrics == {"step": 0, "next": 1}


def test_the_error_is_found_again_and_the_name_is_free_at_once(
    tmp_path: Path, go_on: Path, drivers: Drivers, pipe: Pipe
) -> None:
    function = train_until(go_on, pipe, fails=True)

    def main() -> None:
        for _ in range(2):
            with pytest.raises(WorkerGroupError, match="Lesson: learned") as raised:
                trainer(function, tmp_path).fit()
            first, *_ = raised.value.worker_failures.values()
            assert type(first).__name__ == "Lesson"

    go_on.touch()
    drivers.run(main)
    run = train.attach(tmp_path / "run")
    assert run.status == "failed"
    with pytest.raises(WorkerGroupError, match="Lesson: learned") as raised:
        run.wait()
    first, *_ = raised.value.worker_failures.values()
    assert isinstance(first, Lesson)


def test_a_driver_that_is_killed_before_its_run_begins_leaves_no_run(tmp_path: Path) -> None:
    def drive(ends: bool) -> Any:
        callbacks = [EndsItsDriver()] if ends else []
        return trainer(lambda: 7, tmp_path, *callbacks).fit().return_values

    driver: Any = ray.remote(num_cpus=0, max_retries=0)(drive)
    with pytest.raises(WorkerCrashedError):
        ray.get(driver.remote(ends=True))
    asked = time.monotonic()
    with pytest.raises(LookupError, match="holds no run"):
        train.attach(tmp_path / "run")
    assert time.monotonic() - asked < 30
    with pytest.raises(WorkerCrashedError):
        ray.get(driver.remote(ends=True))
    assert ray.get(driver.remote(ends=False)) == [7]


def test_ctrl_c_only_detaches(
    tmp_path: Path, go_on: Path, drivers: Drivers, pipe: Pipe, wait_until_gone: Callable[..., None]
) -> None:
    function = train_until(go_on, pipe)

    def main() -> None:
        with pytest.raises(UserAbort) as abort:
            trainer(function, tmp_path).fit()
        print(abort.value)

    with drivers(main) as driver:
        pids = hear_pids(pipe, worker=1)["worker"]
        driver.send_signal(signal.SIGINT)
        out, err = driver.communicate(timeout=60)
    assert driver.returncode == 0, err
    assert "no longer waiting for the detached run 'run', which goes on" in out
    run = train.attach("run")
    assert run.status == "running"
    run.stop(save=False)
    assert run.wait(timeout=60).metrics == {"step": 0}
    assert run.status == "stopped"
    wait_until_gone(pids)


def test_a_host_that_does_not_answer_is_named_and_nobody_waits_for_it(
    tmp_path: Path,
    go_on: Path,
    drivers: Drivers,
    pipe: Pipe,
    capfd: pytest.CaptureFixture[str],
) -> None:
    function, callback = train_until(go_on, pipe), TellsItsProcess(pipe)

    def second_fit() -> None:
        with pytest.raises(TimeoutError, match=silent):
            trainer(function, tmp_path).fit()

    with drivers(lambda: trainer(function, tmp_path, callback).fit()):
        (host,) = hear_pids(pipe, worker=1, host=1)["host"]
    run = train.attach("run")
    silent = rf"the process that hosts run 'run' does not answer \(pid {host} on node .*kill -9"
    calls: list[Callable[[], Any]] = [
        lambda: run.status,
        run.stop,
        lambda: train.attach("run"),
        lambda: train.attach(tmp_path / "run"),
    ]
    os.kill(host, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(call) for call in calls]
            with pytest.raises(TimeoutError, match=r"after 1 s run 'run' in .* is not over"):
                run.wait(timeout=1)
            assert "its host does not answer" in repr(run)
            for each in asked:
                with pytest.raises(TimeoutError, match=silent):
                    each.result(timeout=60)
        drivers.run(second_fit)
        with pytest.raises(TimeoutError, match=silent):
            run.wait(timeout=1)
    finally:
        os.kill(host, signal.SIGCONT)
    go_on.touch()
    run.wait(timeout=60)
    assert f"(pid {host} on node" in capfd.readouterr().err


def test_when_its_host_dies_the_run_ends_and_resumes(
    tmp_path: Path, go_on: Path, drivers: Drivers, pipe: Pipe, wait_until_gone: Callable[..., None]
) -> None:
    function = train_until(go_on, pipe)
    callback = TellsItsProcess(pipe)

    def main() -> None:
        run = trainer(function, tmp_path, callback, num_workers=2).start()
        with pytest.raises(ControllerError, match="hosts the run does not answer any more"):
            run.wait()
        assert (run.status, run.metrics) == ("failed", {"step": 0})
        pipe.say("told", 0)

    def again() -> None:
        result = trainer(function, tmp_path, num_workers=2).fit()
        assert result.return_values == [f"rank {rank} from a checkpoint" for rank in range(2)]

    with drivers(main):
        pids = hear_pids(pipe, worker=2, host=1)
        os.kill(pids["host"].pop(), signal.SIGKILL)
        wait_until_gone(pids["worker"])
        hear_pids(pipe, told=1)
    assert_nothing_is_left()
    with pytest.raises(LookupError, match=r'has not ended.*gone; fit.*resume="auto"'):
        train.attach(tmp_path / "run")
    go_on.touch()
    drivers.run(again)


def test_what_cannot_be_detached_is_refused(run_config: RunConfig, tmp_path: Path) -> None:
    config = RunConfig(name="run", storage_path=tmp_path, detached=True)
    here = DataParallelTrainer(
        print, scaling_config=ScalingConfig(num_workers=0), run_config=config
    )
    with pytest.raises(ValueError, match=r"detached=True needs workers.*num_workers=0"):
        here.fit()
    with pytest.warns(UserWarning, match="has started its own Ray, which ends with it"):
        trainer(lambda: None, tmp_path).fit()
    with pytest.raises(TypeError, match=re.escape("RunConfig.detached")):
        RunConfig(detached="yes")  # type: ignore[arg-type]


def test_a_run_in_another_driver_is_reached_by_its_path(
    tmp_path: Path, go_on: Path, drivers: Drivers, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = train_until(go_on, pipe)

    def main() -> None:
        config = RunConfig(name="run", storage_path=tmp_path)
        DataParallelTrainer(
            function, scaling_config=ScalingConfig(num_workers=1), run_config=config
        ).fit()

    with drivers(main) as driver:
        hear_pids(pipe, worker=1)
        run = train.attach(tmp_path / "run")
        assert (run.name, run.status, run.is_done) == ("run", "running", False)
        # It may still stand in `say`, in these tests' conftest.py.
        assert f": {Path(__file__).parents[1]}" in run.diagnose()
        with pytest.raises(TimeoutError, match="it goes on"):
            run.wait(0)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(tempfile, "tempdir", str(tmp_path))
            with pytest.raises(LookupError, match="driver of another user or machine"):
                train.attach(tmp_path / "run")
        run.stop(save=False)
        assert run.wait(60).error is None
        assert run.status == "stopped"
        driver.wait(60)
    assert driver.returncode == 0
