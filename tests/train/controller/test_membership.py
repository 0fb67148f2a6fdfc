"""Tests of the decisions of in-place recoveries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from drawbar._process.serialization import serialize
from drawbar._records.events import AttemptEndCause
from drawbar._recovery.attempt_recovery import AttemptRecovery, Declined, Recovered
from drawbar._recovery.messages import (
    GroupFormed,
    JoinTimedOut,
    RanksLost,
    RecoveryCommand,
    RecoveryDeclined,
    RecoveryFinished,
    RecoveryReady,
)


class Attempt:
    """Recovery of three ranks, and the commands that it has sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[int], RecoveryCommand]] = []
        self.replaced: list[int] = []
        self.recovered: list[Recovered[str]] = []
        self.recovery = AttemptRecovery[str](
            3, self._broadcast, self._replace, self.recovered.append
        )

    def _broadcast(self, ranks: Collection[int], command: RecoveryCommand) -> None:
        self.sent.append((list(ranks), command))

    def _replace(self, rank: int, lost: RanksLost, death: str) -> None:
        self.replaced.append(rank)

    def get_ready(self, generation: int, *ranks: int) -> None:
        for rank in ranks:
            message = RecoveryReady(generation=generation, address=f"host:{rank}" if rank else "")
            assert self.recovery.on_message(rank, message) is None

    def finish(self, rank: int, seconds: float, generation: int = 1) -> None:
        message = RecoveryFinished(generation=generation, stopped_seconds=seconds)
        assert self.recovery.on_message(rank, message) is None


def test_recovery_replaces_dead_rank_and_forms_group_when_all_are_ready() -> None:
    attempt = Attempt()
    assert attempt.recovery.on_death(0, "killed", "") is None
    lost = RanksLost(generation=1, leader=1)
    assert (attempt.sent, attempt.replaced) == ([([1, 2], lost)], [0])
    attempt.get_ready(1, 1, 2)
    assert len(attempt.sent) == 1
    attempt.get_ready(1, 0)
    ranks, formed = attempt.sent[-1]
    assert (ranks, type(formed)) == ([0, 1, 2], GroupFormed)
    attempt.finish(1, 0.5)
    attempt.finish(2, 0.7)
    assert attempt.recovered == []
    attempt.finish(0, 0.0)
    assert attempt.recovered == [
        Recovered({0: "killed"}, Counter[AttemptEndCause]({"worker": 1}), 0.7)
    ]
    assert not attempt.recovery.deaths


def test_recovery_with_another_death_waits_for_all_ranks_again() -> None:
    attempt = Attempt()
    attempt.recovery.on_death(2, "first", "")
    attempt.get_ready(1, 0, 1, 2)
    attempt.recovery.on_death(1, "second", "", "preemption")
    assert attempt.sent[-1] == ([0, 2], RanksLost(generation=2, leader=0))
    attempt.get_ready(1, 1)  # of the earlier generation
    attempt.get_ready(2, 0, 2)
    assert isinstance(attempt.sent[-1][1], RanksLost)
    attempt.get_ready(2, 1)
    assert isinstance(attempt.sent[-1][1], GroupFormed)
    for rank in range(3):
        attempt.finish(rank, 1.0, generation=2)
    num_deaths: Counter[AttemptEndCause] = Counter({"worker": 1, "preemption": 1})
    assert attempt.recovered == [Recovered({1: "second", 2: "first"}, num_deaths, 1.0)]


def test_recovery_without_survivor_or_with_obstacle_is_declined() -> None:
    attempt = Attempt()
    assert attempt.recovery.on_death(0, "a", "no budget") == Declined("no budget")
    attempt = Attempt()
    attempt.recovery.on_death(0, "a", "")
    attempt.recovery.on_death(1, "b", "")
    assert isinstance(attempt.recovery.on_death(2, "c", ""), Declined)
    assert attempt.recovery.deaths == {0: "a", 1: "b", 2: "c"}


def test_recovery_declined_by_rank_that_is_ready_has_no_effect() -> None:
    attempt = Attempt()
    attempt.recovery.on_death(0, "a", "")
    attempt.get_ready(1, 1)
    late = RecoveryDeclined(generation=1, reason="too late")
    assert attempt.recovery.on_message(1, late) is None
    assert attempt.recovery.on_message(2, late) == Declined("rank 2: too late")


def test_time_limit_of_latest_death_concerns_all_new_processes() -> None:
    attempt = Attempt()
    attempt.recovery.on_death(1, "first", "")
    attempt.recovery.on_death(2, "second", "")
    attempt.get_ready(2, 0, 2)
    assert attempt.recovery.on_message(1, JoinTimedOut(1)) is None
    late = attempt.recovery.on_message(2, JoinTimedOut(2))
    assert late == Declined("the new process of rank 1 was not ready within 120 s")
    attempt.get_ready(2, 1)
    assert attempt.recovery.on_message(2, JoinTimedOut(2)) is None


def test_collective_of_the_current_step_is_repeated_for_the_same_call_only() -> None:
    recovery = Attempt().recovery
    payloads = (serialize("batch"),)
    recovery.collectives.record(1000, {0: "line 5", 1: "line 6"}, payloads)  # without the setup
    assert recovery.repeat_collective(1000, 1, "line 6") == payloads
    assert isinstance(recovery.repeat_collective(1000, 1, "line 7"), Declined)


def test_recorded_collective_is_repeated_for_the_same_call_only() -> None:
    recovery = Attempt().recovery
    payloads = (serialize("seed"),)
    recovery.collectives.record(0, {0: "line 1", 1: "line 2"}, payloads)
    assert recovery.repeat_collective(0, 1, "line 2") == payloads
    assert isinstance(recovery.repeat_collective(0, 1, "line 1"), Declined)
    assert isinstance(recovery.repeat_collective(1, 1, "line 2"), Declined)
