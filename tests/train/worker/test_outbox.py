"""Reports that may wait gather on their way to the driver; everything else takes them along."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig, get_context
from drawbar.train._messages import Interrupted, Message, Reported
from drawbar.train._worker.actor import Outbox
from drawbar.train.backend import report_buffered

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

LONG = 1000.0
"""Seconds; a test that has to wait so long fails."""


def report(index: int, *, may_wait: bool) -> Message:
    return Reported(index=index, metrics={}, time=0.0, where="", may_wait=may_wait)


@pytest.fixture
def outbox(monkeypatch: pytest.MonkeyPatch) -> Outbox:
    monkeypatch.setattr("drawbar.train._worker.actor.REPORT_BATCH_S", LONG)
    return Outbox()


def test_the_first_report_goes_at_once(outbox: Outbox) -> None:
    outbox.put(report(0, may_wait=True))
    assert outbox.take_batch() == [report(0, may_wait=True)]


@pytest.mark.parametrize("urgent", [report(2, may_wait=False), Interrupted()])
def test_what_is_urgent_takes_along_what_waits(outbox: Outbox, urgent: Message) -> None:
    taken: list[list[Message]] = []
    outbox.put(report(0, may_wait=True))
    outbox.take_batch()
    taker = threading.Thread(target=lambda: taken.append(outbox.take_batch()), daemon=True)
    taker.start()
    outbox.put(report(1, may_wait=True))
    outbox.put(urgent)
    taker.join(timeout=60)
    outbox.put(report(3, may_wait=False))  # and the next one finds nothing left behind
    assert taken == [[report(1, may_wait=True), urgent]]
    assert outbox.take_batch() == [report(3, may_wait=False)]


def test_reports_that_wait_go_when_it_has_been_long_enough(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox.put(report(0, may_wait=True))
    outbox.take_batch()
    monkeypatch.setattr("drawbar.train._worker.actor.REPORT_BATCH_S", 0.05)
    outbox.put(report(1, may_wait=True))
    outbox.put(report(2, may_wait=True))
    assert outbox.take_batch() == [report(1, may_wait=True), report(2, may_wait=True)]


@pytest.mark.usefixtures("ray_cluster")
def test_reports_keep_their_order_and_none_is_lost(tmp_path: Path) -> None:
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
        own = frame[frame["rank"] == rank]
        assert own["step"].tolist() == own["index"].tolist() == list(range(101))
    assert result.checkpoint is not None


def test_outside_a_training_function_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="report_buffered"):
        report_buffered({"loss": 1.0})
