"""Measurements of times and progress, and the search for slow ranks. No run starts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from drawbar.train import runs
from drawbar.train._controller.attempt_events import ProgressRecorder
from drawbar.train._history.events import ProgressRecorded
from drawbar.train._history.live_events import Event, ProgressReceived
from drawbar.train._history.rank_times import RankTimesOfRank, find_stragglers
from drawbar.train._history.run_progress import RateWindow
from drawbar.train._history.timeline import RunState
from drawbar.train._protocol.messages import Message, ProgressSet
from drawbar.train._worker.progress_sender import ProgressSender
from drawbar.train._worker.rank_timer import MAX_PHASES, RankTimer
from tests.train.event_factories import attempt_started


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timer(clock: Clock) -> RankTimer:
    return RankTimer(clock)


def test_timer_counts_nested_time_once(clock: Clock, timer: RankTimer) -> None:
    with timer.measure("phase:eval"):
        clock.now += 1
        with timer.measure("data_wait"):
            clock.now += 2
        clock.now += 4
    clock.now += 8
    seconds = timer.get_times().seconds
    assert seconds == {"function": 15, "warmup": 0, "phase:eval": 5, "data_wait": 2}


def test_timer_measures_waiting_for_items(clock: Clock, timer: RankTimer) -> None:
    def load() -> list[int]:
        items = []
        for item in timer.measure_items("data_wait", slow_items()):
            clock.now += 10  # a step
            items.append(item)
        return items

    def slow_items() -> Iterator[int]:
        for item in range(3):
            clock.now += 1
            yield item

    assert load() == [0, 1, 2]
    assert timer.get_times().seconds["data_wait"] == 3


def test_timer_suspended_phase_that_ends_late_does_not_affect_others(
    clock: Clock, timer: RankTimer
) -> None:
    timer.begin("phase:a")
    timer.begin("phase:b")
    timer.end("phase:a")
    clock.now += 1
    timer.end("phase:b")
    timer.end("phase:b")
    clock.now += 1
    assert timer.get_times().seconds["phase:b"] == 1


def test_timer_warmup_is_excess_of_first_step(clock: Clock, timer: RankTimer) -> None:
    clock.now += 10
    timer.on_report()
    for _ in range(4):
        with timer.measure("data_wait"):
            clock.now += 5
        clock.now += 1
        timer.on_report()
    times = timer.get_times()
    assert (times.seconds["warmup"], times.steps) == (9, 5)


def test_timer_steps_of_user_replace_reports(clock: Clock, timer: RankTimer) -> None:
    timer.on_report()
    for _ in range(3):
        clock.now += 1
        timer.on_step()
    timer.on_report()
    assert timer.get_times().steps == 3


def test_timer_sends_times_rarely(clock: Clock, timer: RankTimer) -> None:
    sent = 0
    for _ in range(1000):
        clock.now += 0.1
        sent += timer.on_report() is not None
    assert 10 <= sent <= 16


def test_timer_many_phases_are_counted_together(clock: Clock, timer: RankTimer) -> None:
    for number in range(MAX_PHASES + 50):
        with timer.measure(timer.make_phase_key(str(number))):
            clock.now += 1
    seconds = timer.get_times().seconds
    assert seconds["phase:other phases"] == 50
    assert len(seconds) == MAX_PHASES + 3


def make_ranks(steps: int = 100, **slow: float) -> dict[int, RankTimesOfRank]:
    """Return four ranks with steps of 100 ms, of which rank 2 has additional seconds."""
    base = {
        "function": steps * 0.1,
        "data_wait": steps * 0.01,
        "forward": steps * 0.03,
        "checkpoint_save": steps * 0.001,
    }
    ranks = {rank: RankTimesOfRank(steps, base) for rank in range(4)}
    own = {key: base.get(key, 0.0) + slow.get(key, 0.0) for key in {**base, **slow}}
    ranks[2] = RankTimesOfRank(steps, own)
    return ranks


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("data_wait", "data loader"),
        ("forward", "forward pass"),
        ("checkpoint_save", "checkpoint"),
    ],
)
def test_stragglers_are_named_with_their_part(key: str, part: str) -> None:
    (found,) = find_stragglers(make_ranks(100, **{key: 2.0}))
    assert (found.rank, found.part) == (2, part)
    assert found.ratio > 1.3
    assert f"rank 2 is slow in its {part}" in found.describe()


@pytest.mark.parametrize(
    "ranks",
    [
        {},
        make_ranks(),
        make_ranks(data_wait=0.2),  # 3 times as much, but only 2 % of a step
        make_ranks(steps=40, data_wait=2.0),
        {0: make_ranks()[2]},
        make_ranks(100, **{"phase:eval": 5.0}),  # only one rank has this phase
    ],
)
def test_stragglers_need_many_steps_and_a_relevant_difference(
    ranks: dict[int, RankTimesOfRank],
) -> None:
    assert find_stragglers(ranks) == []


def test_stragglers_are_found_after_a_slow_first_step() -> None:
    ranks = {
        rank: RankTimesOfRank(100, {**times.seconds, "function": 110.0, "warmup": 100.0})
        for rank, times in make_ranks(data_wait=1.0).items()
    }
    assert [(found.rank, found.part) for found in find_stragglers(ranks)] == [(2, "data loader")]


def test_stragglers_without_forward_passes_are_found_by_their_computation() -> None:
    seconds = [{"function": 10.0, "collective": wait} for wait in (6.0, 1.0, 6.0)]
    ranks = {rank: RankTimesOfRank(100, value) for rank, value in enumerate(seconds)}
    assert [(found.rank, found.part) for found in find_stragglers(ranks)] == [(1, "computation")]


def test_progress_sender_sends_first_and_last_of_many_updates() -> None:
    messages: list[Message] = []
    sender = ProgressSender(0, messages.append)
    for step in range(100_001):
        sender.set(step, 100_000, "steps")
    sent = [message.done for message in messages if isinstance(message, ProgressSet)]
    assert (sent[0], sent[-1]) == (0, 100_000)
    assert len(sent) < 100
    assert sent == sorted(set(sent))


def test_progress_sender_without_total_sends_last_update_at_flush() -> None:
    messages: list[Message] = []
    sender = ProgressSender(0, messages.append)
    for step in range(10):
        sender.set(step, None, "steps")
    sender.flush()
    sender.flush()
    assert [message.done for message in messages if isinstance(message, ProgressSet)][-1] == 9


def test_progress_sender_of_other_rank_sends_nothing() -> None:
    messages: list[Message] = []
    ProgressSender(1, messages.append).set(1, 1, "steps")
    assert not messages


def test_rate_window_uses_recent_updates_and_restarts_if_counter_decreases() -> None:
    window = RateWindow()
    for second in range(100):
        window.add(second, second if second < 50 else 50 + 10 * (second - 50))
    assert window.get_rate() == 10
    window.add(100, 3)
    assert window.get_rate() is None
    window.add(102, 7)
    assert window.get_rate() == 2


def test_progress_recorder_journals_first_progress_and_the_last_once() -> None:
    emitted: list[Event] = []
    recorder = ProgressRecorder(0, emitted.append)
    for second in range(20):
        recorder.on_progress(ProgressSet(done=second, total=20, unit="steps", time=second))
    recorder.record()
    recorder.record()
    recorded = [event for event in emitted if isinstance(event, ProgressRecorded)]
    assert [event.progress.done for event in recorded] == [0, 19]
    assert recorded[-1].progress.eta_seconds == 1
    assert len([event for event in emitted if isinstance(event, ProgressReceived)]) == 20


def test_run_state_after_restart_has_progress_without_eta() -> None:
    state = RunState()
    state.apply(ProgressReceived(runs.RunProgress(done=5, total=10, rate=1.0)))
    state.apply(attempt_started(1))
    assert state.progress == runs.RunProgress(done=5, total=10)
