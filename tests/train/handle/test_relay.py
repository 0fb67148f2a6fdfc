"""What happens in a run reaches those who follow it from other processes."""

from __future__ import annotations

import threading

import pytest

from drawbar.train._errors import WorkerFailure
from drawbar.train._handle.relay import KEPT, Position, Relay
from drawbar.train._history.events import (
    CheckpointValidated,
    ControllerFailed,
    Event,
    LinePrinted,
    Notice,
    PreemptionAnnounced,
    RunEnded,
    ValidationsPending,
    WorkersFailed,
)
from drawbar.train._messages import PreemptionInfo, Printed
from drawbar.train._serialization import serialize
from drawbar.train._storage.manifest import ReportedCheckpointStatus
from tests.train.told import attempt_started, committed, reported, workers_started

START = Position(0, 0)
FAILURE = WorkerFailure(rank=1, kind="died", type_name="WorkerDied", message="killed by SIGKILL")


def test_events_come_in_order_and_once() -> None:
    relay = Relay()
    relay.on_event(attempt_started(0))
    relay.on_event(LinePrinted(0, Printed(text="a line")))
    events, seen = relay.since(START, 0)
    assert events == [attempt_started(0), LinePrinted(0, Printed(text="a line"))]
    assert relay.since(seen, 0) == ([], seen)
    relay.on_event(Notice("more"))
    assert relay.since(seen, 0)[0] == [Notice("more")]


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
        LinePrinted(1, Printed(text="bad batch", stream="stderr")),
        WorkersFailed("worker", [FAILURE], is_final=False),
        PreemptionAnnounced(PreemptionInfo(None, {"n": [0]})),
        ValidationsPending("checkpoint_000003"),
        ControllerFailed(),
        RunEnded(time=0, outcome="finished"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_a_console_shows_reaches_another_process(event: Event) -> None:
    relay = Relay()
    relay.on_event(event)
    assert serialize(relay.since(START, 0)[0]).deserialize() == [event]


def test_of_the_reports_only_rank_0s_newest_comes() -> None:
    relay = Relay()
    for index in range(1000):
        relay.on_event(reported(0, index, {"loss": index}))
        relay.on_event(reported(1, index, {}))
    events, seen = relay.since(START, 0)
    assert events == [reported(0, 999, {"loss": 999})]
    assert relay.since(seen, 0)[0] == []


def test_who_comes_late_begins_with_how_the_run_stands() -> None:
    relay = Relay()
    relay.on_event(attempt_started(0))
    relay.on_event(workers_started(2))
    relay.on_event(Notice("seen by nobody"))
    relay.on_event(reported(0, 7, {"loss": 1}))
    events, seen = relay.since(None, 0)
    assert events == [workers_started(2), reported(0, 7, {"loss": 1})]
    assert relay.since(seen, 0)[0] == []


def test_what_comes_too_fast_is_counted() -> None:
    relay = Relay()
    for number in range(KEPT + 5):
        relay.on_event(Notice(str(number)))
    events, _ = relay.since(START, 0)
    assert events[0] == Notice("5 lines came too fast to be shown here")
    assert events[1] == Notice("5")
    assert len(events) == KEPT + 1


def test_a_follower_waits_for_the_next_event_or_the_end() -> None:
    relay = Relay()
    for speak in (lambda: relay.on_event(Notice("now")), relay.release):
        threading.Timer(0.05, speak).start()
        relay.since(relay.since(None, 0)[1], timeout=60)  # the test's own limit would tell
