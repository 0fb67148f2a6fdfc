"""Tests of drawbar._process.training_thread: calls from forked children and threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from drawbar import train
from drawbar.train import FailureConfig, Result, RunConfig, collective
from drawbar.train.backend import register_data_position, report_buffered
from drawbar.train.testing import run_in_threads
from tests.train.runs import fit
from tests.train.text_checkpoints import save

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def catch_error(function: Callable[[], Any]) -> str:
    """Run a function and return the RuntimeError that it raised as text, else ""."""
    try:
        function()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def catch_error_in_fork(function: Callable[[], Any]) -> str:
    """Run a function in a forked child and return its error."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, catch_error(function).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as pipe:
        return pipe.read()


def catch_error_in_thread(function: Callable[[], Any]) -> str:
    """Run a function in another thread and return its error."""
    with ThreadPoolExecutor(1) as helper:
        return helper.submit(catch_error, function).result()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("report", lambda: train.report({})),
        ("report", lambda: train.report({}, checkpoint="/")),
        ("checkpoint_dir", train.checkpoint_dir),
        ("get_checkpoint", train.get_checkpoint),
        ("get_dataset_shard", train.get_dataset_shard),
        ("get_all_reported_checkpoints", train.get_all_reported_checkpoints),
        ("should_checkpoint", train.should_checkpoint),
        ("get_context().diagnose", lambda: train.get_context().diagnose()),
        ("collective.barrier", collective.barrier),
        ("report_buffered", lambda: report_buffered({})),
        ("register_data_position", lambda: register_data_position("x", lambda: None)),
    ],
)
def test_report_in_forked_child_raises_with_allowed_callers(
    name: str, call: Any, tmp_path: Path
) -> None:
    pid, error = fit(lambda: [os.getpid(), catch_error_in_fork(call)], tmp_path).return_value
    assert error.startswith(f"RuntimeError: {name}() was called in process ")
    assert f"a fork of process {pid} (rank 0), but only process {pid} can report." in error
    assert error.endswith(
        f"Return the values from the DataLoader worker or child process, and call {name}() in "
        f"process {pid}."
    )


def test_get_context_in_forked_child_returns_rank(tmp_path: Path) -> None:
    def raise_ranks() -> None:
        context = train.get_context()
        raise RuntimeError(context.get_world_rank(), context.get_world_size())

    assert (
        fit(lambda: catch_error_in_fork(raise_ranks), tmp_path).return_value
        == "RuntimeError: (0, 1)"
    )


def test_reports_of_several_threads_have_unique_indices(tmp_path: Path) -> None:
    def function() -> None:
        def report_many(number: int) -> None:
            for step in range(100):
                train.report({"step": step})
            save(f"from thread {number}")

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(report_many, range(4)))

    result = fit(function, tmp_path)
    assert list(result.metrics_dataframe["index"]) == list(range(404))
    assert len(result.best_checkpoints) == 4


@pytest.fixture(scope="module")
def result(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Result of two workers that report in helper threads, and then in two threads at once."""

    def function() -> tuple[str, list[str]]:
        def train_all() -> None:
            train.report({"ranks": collective.all_gather(train.get_context().get_world_rank())})
            save("from the helper")

        helpers = catch_error_in_thread(train_all) + catch_error_in_thread(train_all)
        train.report({})
        calls = [lambda: train.report({}), collective.barrier, lambda: report_buffered({})]
        return helpers, [catch_error_in_thread(call) for call in calls]

    return fit(function, tmp_path_factory.mktemp("run"), num_workers=2)


def test_report_from_second_thread_with_several_workers_raises(result: Result) -> None:
    for _, errors in result.return_values:
        for error, call in zip(errors, ("report()", "a collective", "report()"), strict=True):
            assert f" called {call}, but thread 'training' has already called" in error


def test_report_from_one_helper_thread_with_several_workers_works(result: Result) -> None:
    assert [errors for errors, _ in result.return_values] == ["", ""]
    assert len(result.metrics_dataframe) == 2 * 5
    assert len(result.best_checkpoints) == 2


def test_report_from_thread_of_previous_attempt_raises(tmp_path: Path) -> None:
    def function() -> str:
        context = train.get_context()
        if context.get_attempt() == 0:
            context.cache["pool"] = ThreadPoolExecutor(1)
            context.cache["pool"].submit(train.report, {}).result()
            raise ValueError("the first attempt fails")
        error: str = context.cache["pool"].submit(catch_error, lambda: train.report({})).result()
        return error

    result = fit(function, tmp_path, failure_config=FailureConfig(max_failures=1))
    assert "which started before this attempt of rank 0" in result.return_value
    assert result.metrics is None


def test_report_from_other_thread_in_run_in_threads_raises(run_config: RunConfig) -> None:
    result = run_in_threads(
        lambda: catch_error_in_thread(lambda: train.report({})), run_config=run_config
    )
    assert "report() works inside a training function only" in result.return_value
    remedy = "With drawbar.train.testing, call it in the thread of the function."
    assert remedy in result.return_value
