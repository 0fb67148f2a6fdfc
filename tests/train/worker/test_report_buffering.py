"""Buffered reports are sent in batches, or together with the next urgent message."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig, get_context
from drawbar.train._protocol.messages import (
    CheckpointOffer,
    CollectiveCalled,
    Message,
    RankInterrupted,
    Report,
)
from drawbar.train._storage.contents import FileEntry
from drawbar.train._worker.actor import BURST_REPORTS, Outbox
from drawbar.train.backend import report_buffered

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
    offer = CheckpointOffer(
        directory="", files=(FileEntry("model", 1),), is_staged=True, checkpoint_name="c"
    )
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
