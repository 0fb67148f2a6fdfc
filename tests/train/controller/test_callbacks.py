"""User callbacks: their arguments, order, and errors."""

from __future__ import annotations

import sys
import threading
import typing
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.train import (
    AttemptInfo,
    Checkpoint,
    DataParallelTrainer,
    RunConfig,
    RunContext,
    RunEndInfo,
    ScalingConfig,
    UserCallback,
    WorkerGroupError,
    events,
    runs,
)
from tests.train.runs import fit


class Watcher(UserCallback):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        self.calls.append((run_context.name, metrics, checkpoint and Path(checkpoint).name))

    def after_exception(
        self, run_context: RunContext, worker_exceptions: dict[int, Exception]
    ) -> None:
        self.calls.append(worker_exceptions)


def test_callbacks_see_reports_and_exceptions_in_order(tmp_path: Path) -> None:
    def function() -> None:
        train.report({"a": 1})
        with train.checkpoint_dir() as path:
            train.report({"b": 2}, checkpoint=path)
        raise ValueError("boom")

    watcher = Watcher()
    with pytest.raises(WorkerGroupError):
        fit(function, tmp_path, callbacks=[watcher])
    *reports, exceptions = watcher.calls
    assert reports == [
        ("run", [{"a": 1}], None),
        ("run", [{"b": 2}], "checkpoint_000001"),
    ]
    assert [str(error) for error in exceptions.values()] == ["boom"]


class LifecycleRecorder(UserCallback):
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.run_ids = set[str]()

    def on_run_start(self, run_context: RunContext) -> None:
        self.run_ids.add(run_context.run_id)
        self.calls.append("start")

    def on_attempt_start(self, run_context: RunContext, attempt: AttemptInfo) -> None:
        self.calls.append(attempt)

    def after_report(self, *_: Any) -> None:
        self.calls.append("report")

    def after_exception(self, *_: Any) -> None:
        self.calls.append("exception")

    def on_run_end(self, run_context: RunContext, info: RunEndInfo) -> None:
        self.calls.append(info)


def test_callbacks_see_start_attempts_and_end_of_failed_and_resumed_run(tmp_path: Path) -> None:
    def save_and_fail(config: dict[str, bool]) -> None:
        with train.checkpoint_dir() as path:
            train.report({}, checkpoint=path)
        if config["should_fail"]:
            raise ValueError("boom")

    first, second = LifecycleRecorder(), LifecycleRecorder()
    with pytest.raises(WorkerGroupError):
        fit(save_and_fail, tmp_path, {"should_fail": True}, callbacks=[first])
    fit(save_and_fail, tmp_path, {"should_fail": False}, callbacks=[second])

    *calls, end = first.calls
    attempt = AttemptInfo(attempt=0, num_workers=1, first_report_index=0)
    assert calls == ["start", attempt, "report", "exception"]
    assert end.status == "failed"
    assert "boom" in end.error
    start, attempt, *calls = second.calls
    assert start == "start"
    assert (attempt.attempt, attempt.first_report_index) == (1, 1)
    assert attempt.resume_checkpoint is not None
    assert Path(attempt.resume_checkpoint).name == "checkpoint_000000"
    assert calls == ["report", RunEndInfo(status="finished")]
    assert first.run_ids == second.run_ids
    assert len(first.run_ids) == 1


def test_run_end_callback_finds_all_reports_of_run(tmp_path: Path) -> None:
    class Reader(UserCallback):
        def on_run_end(self, run_context: RunContext, info: RunEndInfo) -> None:
            record = runs.find_run(run_context.path)
            rows.append((info.status, record.status, record.metrics))

    rows: list[Any] = []
    fit(lambda: train.report({"a": 1}), tmp_path, callbacks=[Reader()])
    assert rows == [("finished", "finished", {"a": 1})]


def test_callback_that_rejects_config_raises_before_run() -> None:
    class LocalOnly(UserCallback):
        def check_run_config(self, run_config: RunConfig) -> None:
            raise ValueError(f"{run_config.storage_path} is not supported")

    with pytest.raises(ValueError, match="s3://bucket is not supported"):
        RunConfig(storage_path="s3://bucket", callbacks=[LocalOnly()])


class Broken(UserCallback):
    def after_report(self, *_: Any) -> None:
        raise ValueError("in the callback")


unpickling_threads: list[str] = []


class UnpicklingRecorder(ValueError):
    """Exception that records the thread in which it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (str(self),)


def _unpickle(text: str) -> UnpicklingRecorder:
    unpickling_threads.append(threading.current_thread().name)
    return UnpicklingRecorder(text)


def test_worker_exceptions_are_unpickled_outside_the_controller(
    tmp_path: Path,
) -> None:
    def function() -> None:
        raise UnpicklingRecorder("boom")

    unpickling_threads.clear()
    with pytest.raises(WorkerGroupError) as raised:
        fit(function, tmp_path, callbacks=[Watcher()])
    (callback_thread,) = unpickling_threads
    assert callback_thread.startswith("drawbar-callbacks")
    assert str(raised.value.worker_failures[0]) == "boom"
    assert raised.value.worker_failures is raised.value.worker_failures
    assert unpickling_threads[1:] == [threading.current_thread().name]


def test_callback_that_raises_is_logged_once_and_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def function() -> None:
        for _ in range(3):
            train.report({})

    watcher = Watcher()
    fit(function, tmp_path, callbacks=[Broken(), watcher])
    assert caplog.text.count("Callback Broken.after_report failed. The run continues") == 1
    assert len(watcher.calls) == 3


class Stuck(UserCallback):
    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        threading.Event().wait()


def test_callables_without_names_are_called_and_their_exits_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[object] = []
    named, exiting = UserCallback(), UserCallback()
    exiting.after_report = lambda *arguments: sys.exit("goodbye")  # type: ignore[method-assign]

    class Named:
        def __call__(self, context: RunContext, metrics: object, checkpoint: object) -> None:
            calls.append(metrics)

    vars(named)["after_report"] = Named()
    fit(lambda: train.report({"a": 1}), tmp_path, callbacks=[named, exiting])
    assert calls == [[{"a": 1}]]
    assert "goodbye" in caplog.text


def test_callback_that_never_returns_is_named_and_skipped_by_stop(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drawbar.train._controller.callbacks.DRAIN_NOTICE_S", 0.1)
    run = DataParallelTrainer(
        lambda: train.report({"a": 1}),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path, callbacks=[Stuck()]),
    ).start()
    output = ""
    while "Waiting for callback Stuck.after_report, which has not returned" not in output:
        output += capfd.readouterr().err
    assert (run.status, run.is_done, run.diagnose()) == ("finished", False, "")
    run.stop(save=False)
    assert run.wait().metrics == {"a": 1}


class EventRecorder(UserCallback):
    """Watcher as a user writes it: with public names only."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def on_event(self, run_context: RunContext, event: events.Event) -> None:
        self.events.append(event)


def test_on_event_receives_public_events_of_all_ranks_in_order(tmp_path: Path) -> None:
    def function() -> None:
        rank = train.get_context().get_world_rank()
        train.report({"rank": rank})
        train.set_progress(1, 2)
        with train.checkpoint_dir() as path:
            train.report({"saved": 1}, checkpoint=path if rank == 0 else None)
        if rank == 1 and train.get_context().get_attempt() == 0:
            raise ValueError("boom")

    recorder = EventRecorder()
    fit(
        function,
        tmp_path,
        num_workers=2,
        in_threads=True,
        max_failures=1,
        callbacks=[recorder],
    )
    types = list(dict.fromkeys(type(event) for event in recorder.events))
    assert {events.AttemptStarted, events.ReportsReceived, events.ProgressReceived} <= set(types)
    assert {type(event) for event in recorder.events} <= set(typing.get_args(events.Event))
    assert types[0] is events.AttemptStarted
    reports = [each for each in recorder.events if isinstance(each, events.ReportsReceived)]
    assert {each.rank for each in reports} == {0, 1}
    commits = [each for each in recorder.events if isinstance(each, events.CheckpointCommitted)]
    assert commits[0].name == "checkpoint_000001"
    (failed,) = (each for each in recorder.events if isinstance(each, events.AttemptEnded))
    assert "boom" in failed.failure_headlines[0]
    journal = [event["event"] for event in runs.find_run(tmp_path / "run").list_events()]
    assert journal.index("rank_times") < journal.index("attempt_ended")
    assert journal[-1] == "run_ended"
    last = recorder.events[-1]
    assert isinstance(last, events.RunEnded)
    assert last.outcome == "finished"
