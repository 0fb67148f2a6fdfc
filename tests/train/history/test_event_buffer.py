"""Event buffer for clients in other processes."""

from __future__ import annotations

import threading

import pytest

from drawbar.train._errors import PreemptionInfo
from drawbar.train._history.event_stream import MAX_EVENTS, EventBuffer, EventPosition
from drawbar.train._history.events import CheckpointValidated, PreemptionAnnounced, RunEnded
from drawbar.train._history.live_events import (
    ControllerFailed,
    Event,
    LinePrinted,
    Notice,
    ValidationsPending,
    WorkersFailed,
)
from drawbar.train._protocol.messages import OutputLine
from drawbar.train._serialization import serialize
from drawbar.train._storage.manifest import ReportedCheckpointStatus
from drawbar.train._worker_failure import WorkerFailure
from tests.train.event_factories import attempt_started, committed, reported, workers_started

START = EventPosition(0, 0)
FAILURE = WorkerFailure(rank=1, kind="died", type_name="WorkerDied", message="killed by SIGKILL")


def test_get_events_after_returns_events_in_order_once() -> None:
    event_buffer = EventBuffer()
    event_buffer.on_event(attempt_started(0))
    event_buffer.on_event(LinePrinted(0, OutputLine(text="a line")))
    events, position = event_buffer.get_events_after(START, 0)
    assert events == [attempt_started(0), LinePrinted(0, OutputLine(text="a line"))]
    assert event_buffer.get_events_after(position, 0) == ([], position)
    event_buffer.on_event(Notice("more"))
    assert event_buffer.get_events_after(position, 0)[0] == [Notice("more")]


@pytest.mark.parametrize(
    "event",
    [
        attempt_started(1, "/runs/mnist/checkpoint_000001"),
        workers_started(2),
        committed("checkpoint_000003"),
        CheckpointValidated(
            time=0,
            index=3,
            name="checkpoint_000003",
            status=ReportedCheckpointStatus.VALIDATED,
            metrics={"loss": 0.5},
            error="",
            seconds=1.5,
        ),
        Notice("waiting for CPU=4"),
        LinePrinted(1, OutputLine(text="bad batch", stream="stderr")),
        WorkersFailed("worker", [FAILURE], is_final=False),
        PreemptionAnnounced(time=0, attempt=0, info=PreemptionInfo(None, {"n": [0]})),
        ValidationsPending("checkpoint_000003"),
        ControllerFailed(),
        RunEnded(time=0, outcome="finished"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_get_events_after_returns_serializable_console_events(event: Event) -> None:
    event_buffer = EventBuffer()
    event_buffer.on_event(event)
    assert serialize(event_buffer.get_events_after(START, 0)[0]).deserialize() == [event]


def test_get_events_after_returns_only_latest_report_of_rank_0() -> None:
    event_buffer = EventBuffer()
    for index in range(1000):
        event_buffer.on_event(reported(0, index, {"loss": index}))
        event_buffer.on_event(reported(1, index, {}))
    events, position = event_buffer.get_events_after(START, 0)
    assert events == [reported(0, 999, {"loss": 999})]
    assert event_buffer.get_events_after(position, 0)[0] == []


def test_get_events_after_without_position_returns_current_status() -> None:
    event_buffer = EventBuffer()
    event_buffer.on_event(attempt_started(0))
    event_buffer.on_event(workers_started(2))
    event_buffer.on_event(Notice("received by no client"))
    event_buffer.on_event(reported(0, 7, {"loss": 1}))
    events, position = event_buffer.get_events_after(None, 0)
    assert events == [workers_started(2), reported(0, 7, {"loss": 1})]
    assert event_buffer.get_events_after(position, 0)[0] == []


def test_get_events_after_overflow_counts_lost_events() -> None:
    event_buffer = EventBuffer()
    for number in range(MAX_EVENTS + 5):
        event_buffer.on_event(Notice(str(number)))
    events, _ = event_buffer.get_events_after(START, 0)
    assert events[0] == Notice("5 lines are not shown because they arrived too fast")
    assert events[1] == Notice("5")
    assert len(events) == MAX_EVENTS + 1


def test_get_events_after_waits_for_next_event_or_wake_clients() -> None:
    event_buffer = EventBuffer()
    for act in (lambda: event_buffer.on_event(Notice("now")), event_buffer.wake_clients):
        threading.Timer(0.05, act).start()
        event_buffer.get_events_after(
            event_buffer.get_events_after(None, 0)[1], timeout=60
        )  # without a wake-up, the test times out
