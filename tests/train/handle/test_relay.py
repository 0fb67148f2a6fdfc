"""What a run shows reaches those who follow it from other processes."""

from __future__ import annotations

import threading

import pytest

from drawbar.train._console.console import Console
from drawbar.train._handle.relay import KEPT, Position, Relay
from drawbar.train._messages import Printed

START = Position(0, 0)


def test_calls_come_in_order_and_once() -> None:
    relay = Relay()
    relay.state("starting")
    relay.printed(0, Printed(text="a line"))
    calls, seen = relay.since(START, 0)
    assert calls == [("state", ("starting", "")), ("printed", (0, Printed(text="a line")))]
    assert relay.since(seen, 0) == ([], seen)
    relay.notice("more")
    assert relay.since(seen, 0)[0] == [("notice", ("more",))]


def test_what_came_of_a_validation_comes_too() -> None:
    relay = Relay()
    relay.validated("checkpoint_000003", {"loss": 0.5}, 1.5)
    calls, _ = relay.since(START, 0)
    assert calls == [("validated", ("checkpoint_000003", {"loss": 0.5}, 1.5))]


@pytest.mark.parametrize("method", [name for name in vars(Console) if name[0] != "_"])
def test_nothing_that_a_console_shows_is_left_out(method: str) -> None:
    assert method in vars(Relay)


def test_of_the_reports_only_rank_0s_newest_comes() -> None:
    relay = Relay()
    for index in range(1000):
        relay.report(0, index, {"loss": index})
        relay.report(1, index, {})
    calls, seen = relay.since(START, 0)
    assert calls == [("report", (0, 999, {"loss": 999}))]
    assert relay.since(seen, 0)[0] == []


def test_who_comes_late_begins_with_how_the_run_stands() -> None:
    relay = Relay()
    relay.state("starting")
    relay.state("running")
    relay.workers(2)
    relay.notice("seen by nobody")
    relay.report(0, 7, {"loss": 1})
    calls, seen = relay.since(None, 0)
    assert calls == [
        ("state", ("running", "")),
        ("workers", (2,)),
        ("report", (0, 7, {"loss": 1})),
    ]
    assert relay.since(seen, 0)[0] == []


def test_what_comes_too_fast_is_counted() -> None:
    relay = Relay()
    for number in range(KEPT + 5):
        relay.notice(str(number))
    calls, _ = relay.since(START, 0)
    assert calls[0] == ("notice", ("5 lines came too fast to be shown here",))
    assert calls[1] == ("notice", ("5",))
    assert len(calls) == KEPT + 1


def test_a_follower_waits_for_the_next_call_or_the_end() -> None:
    relay = Relay()
    for speak in (lambda: relay.notice("now"), relay.release):
        threading.Timer(0.05, speak).start()
        relay.since(relay.since(None, 0)[1], timeout=60)  # the test's own limit would tell
