"""A rank in its process: commands and interrupts of an earlier attempt, and batches of messages."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from drawbar import train
from drawbar._process.ranks import Ranks
from drawbar._process.training_thread import AttemptInterrupted, InterruptScope
from drawbar._storage.contents import FileEntry
from drawbar._storage.run_directory import RunDirectory
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig, get_context
from drawbar.train._protocol.assignment import WorkerAssignment, WorkerSpec
from drawbar.train._protocol.commands import CommitCompleted
from drawbar.train._protocol.messages import (
    CollectiveCalled,
    Message,
    RankInterrupted,
    Report,
    StagedOffer,
)
from drawbar.train._worker.actor import BURST_REPORTS, Outbox
from drawbar.train._worker.rank_runner import RankRunner
from drawbar.train.backend import report_buffered


def make_assignment(path: Path, attempt: int) -> WorkerAssignment:
    return WorkerAssignment(
        spec=WorkerSpec(env_vars={}, driver_env=None, metadata={}),
        run_id="r",
        run_directory=RunDirectory(path),
        attempt=attempt,
        first_report_index=0,
        ranks=Ranks(
            world_rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            num_nodes=1,
        ),
    )


def test_command_of_earlier_attempt_is_ignored(tmp_path: Path) -> None:
    runner = RankRunner()
    messages: list[Message] = []
    command = CommitCompleted(report_index=0, checkpoint_name="checkpoint_000000")
    runner.handle_command(command, attempt=0)  # before the first attempt
    for attempt in (0, 1):
        session = runner.start_attempt(make_assignment(tmp_path, attempt), messages.append)
    runner.handle_command(command, attempt=0)
    assert session.checkpoint is None
    runner.handle_command(command, attempt=1)
    assert session.checkpoint is not None


# -- interrupts


def run_until_interrupted(scope: InterruptScope, started: threading.Event) -> None:
    scope.begin()
    started.set()
    while True:
        pass


def test_interrupt_of_running_code_raises_in_its_thread() -> None:
    scope, started, ended = InterruptScope(), threading.Event(), threading.Event()

    def user_code() -> None:
        try:
            run_until_interrupted(scope, started)
        except AttemptInterrupted:
            ended.set()

    threading.Thread(target=user_code, daemon=True).start()
    started.wait()
    scope.interrupt()
    assert ended.wait(300)


def test_interrupt_before_begin_raises_in_begin() -> None:
    scope = InterruptScope()
    scope.interrupt()
    with pytest.raises(AttemptInterrupted):
        scope.begin()


def test_interrupt_after_end_has_no_effect() -> None:
    scope = InterruptScope()
    scope.begin()
    scope.end()
    scope.interrupt()
    assert [number for number in range(1000) if number < 0] == []


@pytest.mark.timeout(60)
def test_interrupt_discarded_by_end_keeps_traced_thread_running() -> None:
    """In Python 3.11, an exception that stays pending stops all functions of a traced thread."""
    for is_late in (False, True):
        scope, ended = InterruptScope(), threading.Event()

        def user_code(scope: InterruptScope, is_late: bool, ended: threading.Event) -> None:
            with contextlib.suppress(AttemptInterrupted):
                scope.begin()
                if is_late:
                    scope.interrupt()
                scope.end()
            [abs(number) for number in range(1000)]
            ended.set()

        threading.setprofile(lambda *_: None)
        try:
            arguments = (scope, is_late, ended)
            threading.Thread(target=user_code, args=arguments, daemon=True).start()
        finally:
            threading.setprofile(None)
        assert ended.wait(300)


@pytest.mark.parametrize("is_sent", [False, True])
def test_raise_interrupt_in_user_thread_prevents_second_exception(is_sent: bool) -> None:
    scope = InterruptScope()
    scope.begin()
    if is_sent:
        with contextlib.suppress(AttemptInterrupted):
            interrupt_and_run(scope)
    with pytest.raises(AttemptInterrupted, match="over"):
        scope.raise_interrupt("over")
    interrupt_and_run(scope)
    scope.end()


def interrupt_and_run(scope: InterruptScope) -> None:
    """Interrupt this thread and run instructions, before one of which the exception arrives."""
    scope.interrupt()
    [abs(number) for number in range(1000)]


def test_raise_interrupt_in_other_thread_keeps_interrupt_of_user_thread() -> None:
    scope = InterruptScope()
    scope.begin()

    def other() -> None:
        with contextlib.suppress(AttemptInterrupted):
            scope.raise_interrupt("over")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    with pytest.raises(AttemptInterrupted):
        interrupt_and_run(scope)
    scope.end()


def test_interrupt_while_starting_threads_raises_in_user_thread() -> None:
    for _ in range(100):
        scope, started, ended = InterruptScope(), threading.Event(), threading.Event()
        thread = threading.Thread(target=start_threads, args=(scope, started, ended), daemon=True)
        thread.start()
        started.wait()
        scope.interrupt()
        assert ended.wait(300)


def start_threads(scope: InterruptScope, started: threading.Event, ended: threading.Event) -> None:
    try:
        scope.begin()
        while True:
            threading.Thread(target=started.set).start()
    except AttemptInterrupted:
        ended.set()


# -- batches of messages


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

LONG = 1000.0
"""Interval in seconds that is longer than the test timeout."""


def report(index: int, *, is_buffered: bool) -> Message:
    return Report(index=index, metrics={}, time=0.0, location="", is_buffered=is_buffered)


@pytest.fixture
def outbox(monkeypatch: pytest.MonkeyPatch) -> Outbox:
    monkeypatch.setattr("drawbar.train._worker.actor.REPORT_BATCH_S", LONG)
    return Outbox(world_size=1)


def test_outbox_sends_first_buffered_report_at_once(outbox: Outbox) -> None:
    outbox.put(report(0, is_buffered=True))
    assert outbox.take_batch() == [report(0, is_buffered=True)]


def report_checkpoint(index: int) -> Message:
    offer = StagedOffer(directory="", files=(FileEntry("model", 1),), checkpoint_name="c")
    return Report(index=index, metrics={}, time=0.0, location="", offer=offer)


BARRIER = CollectiveCalled(sequence=0, number=0, kind="barrier", payload=None, location="")


@pytest.mark.parametrize("urgent", [report_checkpoint(2), BARRIER, RankInterrupted()])
def test_outbox_urgent_message_flushes_buffered_reports(outbox: Outbox, urgent: Message) -> None:
    batches: list[list[Message]] = []
    outbox.put(report(0, is_buffered=True))
    outbox.take_batch()
    consumer = threading.Thread(target=lambda: batches.append(outbox.take_batch()), daemon=True)
    consumer.start()
    outbox.put(report(1, is_buffered=True))
    outbox.put(urgent)
    consumer.join(timeout=300)
    outbox.put(report(3, is_buffered=False))  # the next batch must not contain earlier reports
    assert batches == [[report(1, is_buffered=True), urgent]]
    assert outbox.take_batch() == [report(3, is_buffered=False)]


def test_outbox_sends_buffered_reports_after_interval(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox.put(report(0, is_buffered=True))
    outbox.take_batch()
    monkeypatch.setattr("drawbar.train._worker.actor.REPORT_BATCH_S", 0.05)
    outbox.put(report(1, is_buffered=True))
    outbox.put(report(2, is_buffered=True))
    assert outbox.take_batch() == [report(1, is_buffered=True), report(2, is_buffered=True)]


def test_outbox_after_many_urgent_batches_sends_report_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drawbar.train._worker.actor.MAX_BATCHES_PER_S", 1 / LONG)
    monkeypatch.setattr("drawbar.train._worker.actor.MAX_BATCH_INTERVAL_S", LONG)
    outbox = Outbox(world_size=BURST_REPORTS)
    for _ in range(3):
        outbox.put(BARRIER)
        assert outbox.take_batch() == [BARRIER]
    outbox.put(report(0, is_buffered=False))
    assert outbox.take_batch() == [report(0, is_buffered=False)]


def test_outbox_below_maximum_rate_sends_each_report_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drawbar.train._worker.actor.MAX_BATCHES_PER_S", 1 / LONG)
    monkeypatch.setattr("drawbar.train._worker.actor.MAX_BATCH_INTERVAL_S", LONG)
    world_size = 4
    outbox = Outbox(world_size)
    for index in range(BURST_REPORTS // world_size):
        outbox.put(report(index, is_buffered=False))
        assert outbox.take_batch() == [report(index, is_buffered=False)]


def test_outbox_above_maximum_rate_sends_reports_in_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drawbar.train._worker.actor.MAX_BATCH_INTERVAL_S", 0.05)
    outbox = Outbox(world_size=4096)
    outbox.put(report(0, is_buffered=False))
    assert outbox.take_batch() == [report(0, is_buffered=False)]
    reports = [report(index, is_buffered=False) for index in range(1, 100)]
    for message in reports:
        outbox.put(message)
    assert outbox.take_batch() == reports


@pytest.mark.usefixtures("ray_cluster")
def test_report_buffered_keeps_order_and_loses_no_report(tmp_path: Path) -> None:
    def function() -> None:
        rank = get_context().get_world_rank()
        for step in range(100):
            (report_buffered if step % 7 else train.report)({"step": step})
        if rank == 1:
            report_buffered({"step": 100})
            return
        with train.checkpoint_dir() as path:
            (path / "model").touch()
            train.report({"step": 100}, checkpoint=path)

    result = DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tmp_path),
    ).fit()
    frame: Any = result.metrics_dataframe
    for rank in range(2):
        reports = frame[frame["rank"] == rank]
        assert reports["step"].tolist() == reports["index"].tolist() == list(range(101))
    assert result.checkpoint is not None


def test_report_buffered_outside_training_function_raises() -> None:
    with pytest.raises(RuntimeError, match="report_buffered"):
        report_buffered({"loss": 1.0})
