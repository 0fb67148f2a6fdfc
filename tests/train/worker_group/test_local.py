"""Runs with `num_workers=0`: the training function in this thread, without Ray."""

from __future__ import annotations

import cProfile
import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from drawbar import train
from drawbar.train import (
    ControllerError,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    UserAbort,
    WorkerGroupError,
    collective,
)
from tests.train.runs import fit
from tests.train.text_checkpoints import content, save, save_asynchronously

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

# -- the function


@pytest.mark.parametrize(("wanted", "given"), [({}, ("3",)), ({"GPU": 2}, ("3", "5"))])
def test_local_gpu_ids_are_first_visible_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, float], given: Any
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5,7")
    scaling = ScalingConfig(num_workers=0, use_gpu=True, resources_per_worker=wanted or None)
    result = DataParallelTrainer(
        lambda: train.get_context().get_accelerator_ids(),
        scaling_config=scaling,
        run_config=RunConfig(name="run", storage_path=tmp_path),
    ).fit()
    assert result.return_value == given


@pytest.mark.timeout(60)
def test_local_fit_under_profiler_finishes(tmp_path: Path) -> None:
    profile = cProfile.Profile()

    def train_func() -> None:
        train.report({"loss": 0.5})

    assert profile.runcall(fit, train_func, tmp_path).metrics == {"loss": 0.5}
    assert "train_func" in {getattr(entry.code, "co_name", "") for entry in profile.getstats()}


@pytest.mark.timeout(60)
def test_local_fit_under_debugger_traces_all_threads(tmp_path: Path) -> None:
    def trace(frame: FrameType, event: str, _: object) -> Any:
        seen.add(frame.f_code.co_name)
        return trace

    def train_func() -> None:
        train.report({"loss": 0.5})

    seen = set[str]()
    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        result = fit(train_func, tmp_path)
    finally:
        sys.settrace(before)
        threading.settrace(before)
    assert result.metrics == {"loss": 0.5}
    assert {"train_func", "_run_attempts"} <= seen


def test_local_function_runs_in_thread_of_fit(tmp_path: Path) -> None:
    result = fit(lambda: [threading.get_ident(), os.getpid()], tmp_path)
    assert result.return_value == [threading.get_ident(), os.getpid()]


def test_local_function_shares_captured_variables(tmp_path: Path) -> None:
    seen: list[int] = []
    fit(lambda: seen.append(1), tmp_path)
    assert seen == [1]


def test_local_config_is_copied_for_each_attempt(tmp_path: Path) -> None:
    def function(config: dict[str, Any]) -> dict[str, Any]:
        config["layers"].append(config.pop("width"))
        if train.get_context().get_attempt() == 0:
            raise ValueError
        return config

    config = {"layers": [1], "width": 2}
    result = fit(function, tmp_path, config, failure_config=FailureConfig(max_failures=1))
    assert result.return_value == {"layers": [1, 2]}
    assert config == {"layers": [1], "width": 2}


def test_local_config_defaults_to_empty_dict(tmp_path: Path) -> None:
    def function(config: dict[str, Any]) -> Any:
        return config

    assert fit(function, tmp_path).return_value == {}


def test_local_context_has_world_size_one(tmp_path: Path) -> None:
    def function() -> tuple[Any, ...]:
        context = train.get_context()
        assert repr(context) == "TrainContext('run', rank 0 of 1, attempt 0)"
        ranks = (context.get_world_rank(), context.get_local_rank(), context.get_node_rank())
        sizes = (context.get_world_size(), context.get_local_world_size())
        return (*ranks, *sizes, context.get_metadata(), context.get_storage())

    result = fit(function, tmp_path, metadata={"by": "ann"})
    assert result.return_value == (0, 0, 0, 1, 1, {"by": "ann"}, tmp_path / "run")


def test_local_fit_does_not_start_ray(tmp_path: Path, drivers: Drivers) -> None:
    def main() -> None:
        import ray

        fit(lambda: save("a"), tmp_path)
        print("ray:", ray.is_initialized())

    with drivers(main) as driver:
        out, _ = driver.communicate(timeout=300)
    assert out == "ray: False\n"


def test_local_collectives_return_own_values(tmp_path: Path) -> None:
    def function() -> list[Any]:
        collective.barrier()
        return [collective.broadcast_from_rank_zero("a"), collective.all_gather("b")]

    assert fit(function, tmp_path).return_value == ["a", ["b"]]


def test_report_from_user_thread_is_accepted(tmp_path: Path) -> None:
    def function() -> None:
        thread = threading.Thread(target=train.report, args=({"from": "a thread"},))
        thread.start()
        thread.join()

    assert fit(function, tmp_path).metrics == {"from": "a thread"}


def test_local_fit_inside_fit_reports_separately(tmp_path: Path) -> None:
    def function() -> None:
        inner = fit(lambda: train.report({"inner": 1}), tmp_path / "inner")
        train.report({"outer": inner.metrics})

    assert fit(function, tmp_path).metrics == {"outer": {"inner": 1}}


_first_runs, _second_runs, _first_has_ended = (threading.Event() for _ in range(3))


def overlap(name: str) -> None:
    is_running, awaited = {
        "first": (_first_runs, _second_runs),
        "second": (_second_runs, _first_has_ended),
    }[name]
    is_running.set()
    assert awaited.wait(300)
    train.report({"from": name})


def test_concurrent_local_runs_receive_their_own_reports(tmp_path: Path) -> None:
    def run(name: str) -> dict[str, Any] | None:
        return fit(partial(overlap, name), tmp_path / name).metrics

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, "first")
        assert _first_runs.wait(300)
        second = pool.submit(run, "second")
        assert first.result(60) == {"from": "first"}
        _first_has_ended.set()
        assert second.result(60) == {"from": "second"}
    assert "RANK" not in os.environ
    with pytest.raises(RuntimeError, match="works inside a training function"):
        train.report({})


@pytest.mark.parametrize(
    "call", [lambda: train.report({}), train.get_context, train.get_checkpoint]
)
def test_train_functions_outside_run_raise_runtime_error(call: Any, tmp_path: Path) -> None:
    fit(lambda: None, tmp_path)
    with pytest.raises(RuntimeError, match=r"\(\) works inside a training function"):
        call()


# -- effects on the process


def test_local_output_is_shown_and_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> None:
        print("to stdout")
        print("to stderr", file=sys.stderr)

    fit(function, tmp_path)
    out, err = capfd.readouterr()
    assert out == "to stdout\n"
    # `print` writes the end of the line separately, so a line of the console may be before it.
    assert "to stderr" in err
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert log.splitlines() == ["to stdout", "to stderr"]


@pytest.mark.parametrize("fails", [False, True])
def test_local_fit_restores_environment_and_directory(tmp_path: Path, fails: bool) -> None:
    def function() -> None:
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
        os.environ["DRAWBAR_TEST"] = "1"
        del os.environ["PATH"]
        os.chdir(tmp_path)
        assert not fails

    before = (dict(os.environ), os.getcwd(), sys.stdout, sys.stderr)
    if fails:
        with pytest.raises(WorkerGroupError):
            fit(function, tmp_path)
    else:
        fit(function, tmp_path)
    assert (dict(os.environ), os.getcwd(), sys.stdout, sys.stderr) == before


def test_local_fit_sets_only_changed_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native threads read the environment without a lock, while its table may be reallocated."""
    touched: list[str] = []
    put, unset = os.putenv, os.unsetenv

    def record_put(name: bytes, value: bytes) -> None:
        touched.append(os.fsdecode(name))
        put(name, value)

    def record_unset(name: bytes) -> None:
        touched.append(os.fsdecode(name))
        unset(name)

    monkeypatch.setenv("HF_FORWARDED", "1")
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)  # set by Ray, unset in the function
    monkeypatch.setattr(os, "putenv", record_put)
    monkeypatch.setattr(os, "unsetenv", record_unset)

    def function() -> set[str]:
        os.environ["PATH"] += ":/mine"
        started_with = set(touched)
        touched.clear()
        return started_with

    before = dict(os.environ)
    started_with = fit(function, tmp_path).return_value
    assert {"RANK", "PATH"} <= started_with
    assert not (started_with - {"PATH"}) & before.keys()
    assert sorted(touched) == sorted(started_with)
    assert dict(os.environ) == before


def test_local_fit_leaves_no_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    fit(lambda: save_asynchronously("abcde"), tmp_path)
    assert set(threading.enumerate()) == before


# -- restarts and interrupts


def test_local_restart_resumes_from_latest_checkpoint(tmp_path: Path) -> None:
    def function() -> tuple[int, str, list[int]]:
        context = train.get_context()
        seen = context.cache.setdefault("attempts", [])
        seen.append(context.get_attempt())
        if context.get_attempt() < 2:
            save(f"of attempt {context.get_attempt()}")
            raise ValueError
        return context.get_attempt(), content(train.get_checkpoint()), seen

    result = fit(function, tmp_path, failure_config=FailureConfig(max_failures=2))
    assert result.return_value == (2, "of attempt 1", [0, 1, 2])
    assert result.error is None


def test_local_restarts_end_when_budget_is_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    attempts: list[int] = []

    def function() -> None:
        attempts.append(train.get_context().get_attempt())
        raise ValueError("again")

    with pytest.raises(WorkerGroupError, match=r"FailureConfig.max_failures=2 is used up"):
        fit(function, tmp_path, failure_config=FailureConfig(max_failures=2))
    assert attempts == [0, 1, 2]
    assert capfd.readouterr().err.count("starts again from the beginning") == 1


@pytest.mark.parametrize("reads", [False, True])
def test_restart_that_reads_no_checkpoint_is_noted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], reads: bool
) -> None:
    def function() -> None:
        if reads:
            train.get_checkpoint()
        for step in range(3):
            save(f"of step {step}")
            if step == 1 and train.get_context().get_attempt() == 0:
                raise ValueError("again")

    fit(function, tmp_path, failure_config=FailureConfig(max_failures=1))
    notice = "it has not read checkpoint_000001, from which it resumes"
    assert capfd.readouterr().err.count(notice) == (not reads)


def test_failure_with_undecodable_file_name_is_restarted(tmp_path: Path) -> None:
    def function() -> str:
        if train.get_context().get_attempt() == 0:
            raise ValueError("cannot read " + os.fsdecode(b"caf\xe9.txt"))
        return "restarted"

    result = fit(function, tmp_path, failure_config=FailureConfig(max_failures=1))
    assert result.return_value == "restarted"
    assert r"cannot read caf\udce9.txt" in (tmp_path / "run" / "journal.jsonl").read_text().replace(
        r"\\", "\\"
    )


def test_second_fit_resumes_from_first(tmp_path: Path) -> None:
    def function() -> Any:
        start = train.get_checkpoint()
        save("first" if start is None else content(start) + ", second")
        return train.get_context().get_run_id(), train.get_context().get_attempt()

    first, second = fit(function, tmp_path), fit(function, tmp_path)
    assert content(second.checkpoint) == "first, second"
    assert second.return_value == (first.return_value[0], 1)
    assert second.metrics_dataframe["index"].tolist() == [0, 1]


def test_failure_outside_function_releases_run_directory(
    tmp_path: Path,
) -> None:
    log = tmp_path / "run" / "logs" / "rank_0.log"
    log.mkdir(parents=True)
    with pytest.raises(WorkerGroupError, match=r"max_failures=1 is used up") as raised:
        fit(lambda: None, tmp_path, failure_config=FailureConfig(max_failures=1))
    assert isinstance(raised.value.worker_failures[0], IsADirectoryError)
    log.rmdir()
    assert fit(lambda: "again", tmp_path).return_value == "again"


@pytest.mark.usefixtures("ray_cluster")  # datasets need Ray
def test_dataset_factory_with_stop_iteration_fails_run(tmp_path: Path) -> None:
    def make() -> Any:
        return next(iter(()))

    trainer = DataParallelTrainer(
        lambda: None,
        datasets={"train": make},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name="run",
            storage_path=tmp_path,
            failure_config=FailureConfig(max_startup_failures=0),
        ),
    )
    with pytest.raises(ControllerError, match=r"the workers could not start: .*StopIteration"):
        trainer.fit()


@pytest.mark.parametrize("max_failures", [0, 3])
def test_ctrl_c_in_local_function_stops_gracefully(tmp_path: Path, max_failures: int) -> None:
    def function() -> None:
        save("a")
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(UserAbort, match=f"the run is in {tmp_path}/run. To resume from the latest"):
        fit(function, tmp_path, failure_config=FailureConfig(max_failures=max_failures))
    result = Result.from_path(tmp_path / "run")
    assert [each.outcome for each in result.timeline.attempts] == ["stopped"]
    assert content(result.checkpoint) == "a"
    assert result.error is None


INTERRUPTED = """
import signal
from drawbar import train

train.DataParallelTrainer(
    lambda: signal.raise_signal(signal.SIGINT),
    scaling_config=train.ScalingConfig(num_workers=0),
    run_config=train.RunConfig(name="run", storage_path="."),
).fit()
"""


def test_ctrl_c_ends_script_with_code_130(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    script = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert script.returncode == 128 + signal.SIGINT
    assert "UserAbort: stopped by Ctrl-C; the run is in" in script.stderr.splitlines()[-1]


def test_ctrl_c_in_interactive_python_does_not_end_it(tmp_path: Path) -> None:
    command = [sys.executable, "-i", "-c", INTERRUPTED]
    script = subprocess.run(
        command, cwd=tmp_path, input="print('continues')", capture_output=True, text=True
    )
    assert (script.returncode, script.stdout) == (0, "continues\n")
    assert "UserAbort: stopped by Ctrl-C" in script.stderr


# -- debuggers

SCRIPT = """
from drawbar import train

def function():
    x = 41
    breakpoint()
    train.report({"x": x})

trainer = train.DataParallelTrainer(
    function,
    scaling_config=train.ScalingConfig(num_workers=0),
    run_config=train.RunConfig(name="run", storage_path="."),
)
print("metrics:", trainer.fit().metrics)
"""


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    return [sys.executable, "script.py"]


def test_breakpoint_with_piped_input_works(script: list[str], tmp_path: Path) -> None:
    process = subprocess.run(
        script,
        cwd=tmp_path,
        input="p x + 1\nx = 7\nc\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "(Pdb) 42\n" in process.stdout
    assert process.stdout.endswith("metrics: {'x': 7}\n")


def test_breakpoint_on_terminal_works(script: list[str], tmp_path: Path) -> None:
    terminal, inside = pty.openpty()
    with subprocess.Popen(
        script, cwd=tmp_path, stdin=inside, stdout=inside, stderr=inside
    ) as process:
        os.close(inside)
        assert b"train.report" in read_until(terminal, b"(Pdb) ")
        os.write(terminal, b"p x + 1\nc\n")
        assert b"\n42\r\n" in read_until(terminal, b"metrics: {'x': 41}")
    os.close(terminal)
    assert process.returncode == 0


def read_until(terminal: int, text: bytes) -> bytes:
    shown = b""
    while text not in shown:
        shown += os.read(terminal, 4096)
    return shown
