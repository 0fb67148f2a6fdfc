"""Who may call `report()` and its companions: forked children may not, threads may."""

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
from tests.train.local_runs import fit, save

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def in_place(function: Callable[[], Any]) -> str:
    """Run a function; give what it raised."""
    try:
        function()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def in_child(function: Callable[[], Any]) -> str:
    """Do so in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, in_place(function).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader) as answer:
        return answer.read()


def in_thread(function: Callable[[], Any]) -> str:
    """Do so in a thread, to its end."""
    with ThreadPoolExecutor(1) as helper:
        return helper.submit(in_place, function).result()


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
def test_a_forked_child_is_told_who_may_call(name: str, call: Any, tmp_path: Path) -> None:
    told = fit(lambda: [os.getpid(), in_child(call)], tmp_path).return_value
    assert told[1].startswith(f"RuntimeError: {name}() was called in process ")
    assert f"a fork of process {told[0]} (rank 0)" in told[1]
    assert told[1].endswith(f"Return it to process {told[0]}, and call {name}() there")


def test_a_forked_child_knows_its_rank(tmp_path: Path) -> None:
    def tell() -> None:
        context = train.get_context()
        raise RuntimeError(context.get_world_rank(), context.get_world_size())

    assert fit(lambda: in_child(tell), tmp_path).return_value == "RuntimeError: (0, 1)"


def test_reports_of_many_threads_are_each_numbered_once(tmp_path: Path) -> None:
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


def two_ranks(function: Callable[[], Any], config: RunConfig) -> Result:
    """Run a function on each of two ranks of a run in worker processes."""
    return train.DataParallelTrainer(
        function, scaling_config=train.ScalingConfig(num_workers=2), run_config=config
    ).fit()


@pytest.mark.usefixtures("ray_cluster")
def test_on_several_workers_a_second_thread_is_refused(run_config: RunConfig) -> None:
    def function() -> list[str]:
        train.report({})
        second = [lambda: train.report({}), collective.barrier, lambda: report_buffered({})]
        return [in_thread(call) for call in second]

    for told in two_ranks(function, run_config).return_values:
        for message, call in zip(told, ("report()", "a collective", "report()"), strict=True):
            assert f" called {call}, and thread 'training' has reported" in message


@pytest.mark.usefixtures("ray_cluster")
def test_on_several_workers_any_one_thread_may_train(run_config: RunConfig) -> None:
    def function() -> str:
        def train_all() -> None:
            train.report({"ranks": collective.all_gather(train.get_context().get_world_rank())})
            save("from the helper")

        return in_thread(train_all) + in_thread(train_all)

    result = two_ranks(function, run_config)
    assert result.return_values == ["", ""]
    assert result.metrics is not None
    assert len(result.best_checkpoints) == 2


def test_a_thread_that_an_attempt_left_behind_does_not_report_into_the_next(tmp_path: Path) -> None:
    def function() -> str:
        context = train.get_context()
        if context.get_attempt() == 0:
            context.cache["pool"] = ThreadPoolExecutor(1)
            context.cache["pool"].submit(train.report, {}).result()
            raise ValueError("the first attempt fails")
        told: str = context.cache["pool"].submit(in_place, lambda: train.report({})).result()
        return told

    result = fit(function, tmp_path, failure_config=FailureConfig(max_failures=1))
    assert "which started before this attempt of rank 0" in result.return_value
    assert result.metrics is None


def test_in_a_world_of_threads_other_threads_are_told(run_config: RunConfig) -> None:
    result = run_in_threads(lambda: in_thread(lambda: train.report({})), run_config=run_config)
    assert "with drawbar.train.testing, any other thread" in result.return_value
