"""Observers of a run: what they see, and that they only watch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.train import (
    Checkpoint,
    DataParallelTrainer,
    RunConfig,
    RunContext,
    ScalingConfig,
    UserCallback,
    WorkerGroupError,
)


def fit(function: Any, folder: Path, callbacks: list[UserCallback]) -> None:
    DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=folder, callbacks=callbacks),
    ).fit()


class Watcher(UserCallback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        self.seen.append((run_context.name, metrics, checkpoint and Path(checkpoint).name))

    def after_exception(
        self, run_context: RunContext, worker_exceptions: dict[int, Exception]
    ) -> None:
        self.seen.append(worker_exceptions)


def test_callbacks_see_reports_and_exceptions_in_order(tmp_path: Path) -> None:
    def function() -> None:
        train.report({"a": 1})
        with train.checkpoint_dir() as path:
            train.report({"b": 2}, checkpoint=path)
        raise ValueError("boom")

    watcher = Watcher()
    with pytest.raises(WorkerGroupError):
        fit(function, tmp_path, [watcher])
    *reports, exceptions = watcher.seen
    assert reports == [
        ("run", [{"a": 1}], None),
        ("run", [{"b": 2}], "checkpoint_000001"),
    ]
    assert [str(error) for error in exceptions.values()] == ["boom"]


class Broken(UserCallback):
    def after_report(self, *_: Any) -> None:
        raise ValueError("in the callback")


unpickled_by: list[str] = []


class Recorded(ValueError):
    """Says which thread unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _recorded, (str(self),)


def _recorded(text: str) -> Recorded:
    unpickled_by.append(threading.current_thread().name)
    return Recorded(text)


def test_what_users_raise_is_unpickled_by_who_asks_for_it_and_never_by_the_controller(
    tmp_path: Path,
) -> None:
    def function() -> None:
        raise Recorded("boom")

    unpickled_by.clear()
    with pytest.raises(WorkerGroupError) as raised:
        fit(function, tmp_path, [Watcher()])
    (by_the_callback,) = unpickled_by
    assert by_the_callback.startswith("drawbar-callbacks")
    assert str(raised.value.worker_failures[0]) == "boom"
    assert raised.value.worker_failures is raised.value.worker_failures
    assert unpickled_by[1:] == [threading.current_thread().name]


def test_a_callback_that_fails_is_logged_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def function() -> None:
        for _ in range(3):
            train.report({})

    watcher = Watcher()
    fit(function, tmp_path, [Broken(), watcher])
    assert caplog.text.count("Callback Broken.after_report failed. The run continues") == 1
    assert len(watcher.seen) == 3


class Stuck(UserCallback):
    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        threading.Event().wait()


def test_a_callback_that_does_not_return_is_named_and_given_up_by_a_stop(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drawbar.train._controller.callbacks.DRAIN_NOTICE_S", 0.1)
    run = DataParallelTrainer(
        lambda: train.report({"a": 1}),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path, callbacks=[Stuck()]),
    ).start()
    said = ""
    while "Waiting for callback Stuck.after_report, which has not returned" not in said:
        said += capfd.readouterr().err
    assert (run.status, run.is_done, run.diagnose()) == ("finished", False, "")
    run.stop(save=False)
    assert run.wait().metrics == {"a": 1}
