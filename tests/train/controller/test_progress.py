"""Rounds, shares, collectives, and every proof that ranks can never meet. No Ray, no files."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from drawbar.train._controller.progress import AttemptProgress, ReportRound
from drawbar.train._messages import (
    CheckpointConsistencyMode,
    CheckpointsAsked,
    CollectiveCalled,
    CollectiveKind,
    Offer,
    Reported,
)
from drawbar.train._storage.contents import FileEntry


def report(index: int, *files: str, waits: bool = False, metrics: float = 0) -> Reported:
    """With files it has a checkpoint; "" is one without any file."""
    entries = tuple(FileEntry(name, len(name)) for name in files if name)
    offer = Offer(directory="/d", files=entries, staged=False, name="c") if files else None
    return Reported(
        index=index,
        metrics={"m": metrics},
        time=0,
        where=f"t.py:{index} in f",
        offer=offer,
        waits=waits,
    )


def named(name: str, *files: str) -> Reported:
    """A report with a checkpoint of this name."""
    plain = report(0, *files)
    assert plain.offer is not None
    return replace(plain, offer=replace(plain.offer, name=name))


def save(index: int) -> Reported:
    """A report that waits for its checkpoint."""
    return report(index, "model", waits=True)


def call(sequence: int = 0, kind: CollectiveKind = "barrier") -> CollectiveCalled:
    where = f"t.py:9{sequence}"
    return CollectiveCalled(
        sequence=sequence, number=sequence, kind=kind, payload=None, where=where
    )


def shares(complete: ReportRound) -> dict[int, list[str]]:
    return {rank: [file.path for file in files] for rank, files in complete.assigned_files.items()}


def asks(*, timed: bool = False) -> CheckpointsAsked:
    until = CheckpointConsistencyMode.COMMITTED
    return CheckpointsAsked(number=0, until=until, timed=timed, where="t.py:7")


# -- the list of checkpoints


def test_the_list_waits_for_the_reports_of_all_that_go_on() -> None:
    progress = AttemptProgress(world_size=2, first_index=4)
    progress.on_report(1, report(4))
    assert progress.has_missing_reports(5)
    progress.on_report(0, report(4))
    assert not progress.has_missing_reports(5)
    progress.on_report(1, report(5))
    progress.on_finished(0)
    assert not progress.has_missing_reports(6)


def test_a_list_that_can_never_come_is_proved() -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    progress.on_report(1, report(0))
    progress.on_checkpoints_requested(1, asks())
    assert progress.find_divergence() is None
    progress.on_collective(0, call())
    assert (progress.find_divergence() or "").splitlines()[0] == (
        "rank 0 waits in collective #0 (barrier) at t.py:90; "
        "rank 1 waits in get_all_reported_checkpoints() for report #0 at t.py:7"
    )
    progress.on_checkpoints_reply(1)
    assert progress.find_divergence() is None


def test_one_that_is_waited_for_so_long_only_is_none() -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    progress.on_report(1, report(0))
    progress.on_checkpoints_requested(1, asks(timed=True))
    progress.on_collective(0, call())
    assert progress.find_divergence() is None


# -- rounds


def test_a_round_is_complete_when_the_last_rank_has_reported_it() -> None:
    progress = AttemptProgress(world_size=3, first_index=0)
    assert progress.on_report(0, report(0, "a")) == []
    assert progress.on_report(2, report(0)) == []
    (complete,) = progress.on_report(1, report(0, "b"))
    assert complete.index == 0
    assert shares(complete) == {0: ["a"], 1: ["b"]}
    assert sorted(complete.offers) == [0, 1]


def test_a_rank_that_is_behind_completes_several_rounds_in_order() -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    for index in range(3):
        assert progress.on_report(0, report(index, "a")) == []
    completed = [r.index for index in range(3) for r in progress.on_report(1, report(index))]
    assert completed == [0, 1, 2]


def test_a_rank_that_is_ahead_has_its_files_wait_for_the_others() -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    assert progress.on_report(0, report(0)) == []
    assert progress.on_report(0, report(1, "a")) == []
    assert progress.on_report(1, report(0)) == []
    assert [complete.index for complete in progress.on_report(1, report(1))] == [1]


def test_reports_are_numbered_from_the_first_index() -> None:
    progress = AttemptProgress(world_size=1, first_index=7)
    assert [complete.index for complete in progress.on_report(0, report(7, "a"))] == [7]
    assert progress.ranks[0].reports == 8


def test_rounds_without_files_are_not_kept() -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    for index in range(1000):
        assert progress.on_report(0, report(index)) == []
    assert progress.on_report(1, report(0)) == []


def test_observers_get_every_round_with_every_ranks_metrics() -> None:
    progress = AttemptProgress(world_size=2, first_index=0, should_keep_all_rounds=True)
    progress.on_report(1, report(0, metrics=1))
    (complete,) = progress.on_report(0, report(0, metrics=2))
    assert {rank: each.metrics["m"] for rank, each in complete.reports.items()} == {0: 2, 1: 1}
    assert (complete.offers, complete.assigned_files) == ({}, {})


# -- shares


@pytest.mark.parametrize(
    ("offered", "given"),
    [
        ({0: ["a", "b"], 1: ["c"]}, {0: ["a", "b"], 1: ["c"]}),
        ({0: ["same"], 1: ["same"], 2: ["same"]}, {0: ["same"], 1: [], 2: []}),
        ({1: ["a", "s"], 2: ["s", "b"]}, {1: ["a", "s"], 2: ["b"]}),
        ({2: ["s", "x/y"], 0: ["s"]}, {0: ["s"], 2: ["x/y"]}),
        ({0: [""], 1: ["a"]}, {0: [], 1: ["a"]}),
        ({0: [""]}, {0: []}),
    ],
)
def test_each_file_comes_from_the_lowest_rank_that_has_it(
    offered: dict[int, list[str]], given: dict[int, list[str]]
) -> None:
    progress = AttemptProgress(world_size=3, first_index=0)
    completed: list[ReportRound] = []
    for rank in (2, 1, 0):
        completed += progress.on_report(rank, report(0, *offered.get(rank, [])))
    assert [shares(complete) for complete in completed] == [given]


@pytest.mark.parametrize(
    ("reports", "conflict"),
    [
        ([named("best", "a"), report(0), named("best", "a", "b")], None),
        (
            [report(0, "deep/a"), report(0, "deep/b"), report(0, "deep")],
            "the checkpoint has 'deep' as a directory from rank 0",
        ),
        (
            [report(0, "a"), report(0), report(0, "a/b/c")],
            "the checkpoint has 'a' as a file from rank 0",
        ),
        (
            [report(0), named("best", "a"), named("last", "b")],
            "rank 1 (report #0 at t.py:0 in f) names the checkpoint 'best', "
            "rank 2 (report #0 at t.py:0 in f) names it 'last'",
        ),
    ],
)
def test_offers_that_do_not_fit_are_told_apart(
    reports: list[Reported], conflict: str | None
) -> None:
    progress = AttemptProgress(world_size=len(reports), first_index=0)
    (complete,) = [
        one for rank, each in enumerate(reports) for one in progress.on_report(rank, each)
    ]
    told = complete.find_conflict()
    assert told is None if conflict is None else conflict in str(told)


# -- collectives


def test_a_collective_is_complete_when_every_rank_is_in_it() -> None:
    progress = AttemptProgress(world_size=3, first_index=0)
    assert progress.on_collective(1, call()) is None
    assert progress.on_collective(0, call()) is None
    calls = progress.on_collective(2, call())
    assert calls is not None
    assert sorted(calls) == [0, 1, 2]
    assert all(each.awaited_collective is None for each in progress.ranks.values())
    assert progress.on_collective(0, call(1)) is None


def test_all_ranks_have_finished_when_the_last_one_has() -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    assert not progress.on_finished(1)
    assert progress.on_finished(0)
    assert progress.find_divergence() is None


# -- divergence: what can be proved


def finished_rank_in_a_barrier(progress: AttemptProgress) -> None:
    progress.on_finished(1)
    progress.on_collective(0, call())


def barrier_then_the_other_finishes(progress: AttemptProgress) -> None:
    progress.on_collective(0, call())
    progress.on_finished(1)


def checkpoint_that_a_finished_rank_never_reports(progress: AttemptProgress) -> None:
    progress.on_report(1, report(0))
    progress.on_finished(1)
    progress.on_report(0, report(0))
    progress.on_report(0, save(1))


def pending_checkpoint_of_a_rank_that_runs_on(progress: AttemptProgress) -> None:
    progress.on_report(0, report(0, "a"))
    progress.on_report(0, report(1))
    progress.on_finished(1)


def different_collectives(progress: AttemptProgress) -> None:
    progress.on_collective(0, call(kind="barrier"))
    progress.on_collective(1, call(kind="all_gather"))


def barrier_against_checkpoint(progress: AttemptProgress) -> None:
    progress.on_collective(0, call())
    progress.on_report(1, save(0))


def checkpoint_against_barrier(progress: AttemptProgress) -> None:
    progress.on_report(1, save(0))
    progress.on_collective(0, call())


def checkpoint_against_barrier_after_one_of_each(progress: AttemptProgress) -> None:
    for rank in (0, 1):
        progress.on_collective(rank, call(0))
        progress.on_report(rank, save(0))
    progress.on_committed(0)
    progress.on_report(0, save(1))
    progress.on_collective(1, call(1))


def own_barrier_against_own_pending_checkpoint(progress: AttemptProgress) -> None:
    """Rank 1 waits in a barrier with a checkpoint pending; rank 0 has finished without both."""
    progress.on_report(1, report(0, "a"))
    progress.on_collective(1, call())
    progress.on_finished(0)


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (
            finished_rank_in_a_barrier,
            "rank 1 finished after 0 reports and 0 collectives; "
            "rank 0 waits in collective #0 (barrier) at t.py:90",
        ),
        (
            barrier_then_the_other_finishes,
            "rank 1 finished after 0 reports and 0 collectives; "
            "rank 0 waits in collective #0 (barrier) at t.py:90",
        ),
        (
            checkpoint_that_a_finished_rank_never_reports,
            "rank 1 finished after 1 reports and 0 collectives, the last at t.py:0 in f; "
            "rank 0 waits for report #1 with a checkpoint at t.py:1 in f",
        ),
        (
            pending_checkpoint_of_a_rank_that_runs_on,
            "rank 1 finished after 0 reports and 0 collectives; "
            "rank 0 has a checkpoint pending in report #0 from t.py:0 in f",
        ),
        (
            different_collectives,
            "rank 0 waits in collective #0 (barrier) at t.py:90; "
            "rank 1 waits in collective #0 (all_gather) at t.py:90",
        ),
        (
            barrier_against_checkpoint,
            "rank 0 waits in collective #0 (barrier) at t.py:90; "
            "rank 1 waits for report #0 with a checkpoint at t.py:0 in f",
        ),
        (
            checkpoint_against_barrier,
            "rank 0 waits in collective #0 (barrier) at t.py:90; "
            "rank 1 waits for report #0 with a checkpoint at t.py:0 in f",
        ),
        (
            checkpoint_against_barrier_after_one_of_each,
            "rank 0 waits for report #1 with a checkpoint at t.py:1 in f; "
            "rank 1 waits in collective #1 (barrier) at t.py:91",
        ),
        (
            own_barrier_against_own_pending_checkpoint,
            "rank 0 finished after 0 reports and 0 collectives; "
            "rank 1 waits in collective #0 (barrier) at t.py:90",
        ),
    ],
)
def test_a_wait_that_can_never_end_is_told(
    happens: Callable[[AttemptProgress], None], reason: str
) -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    happens(progress)
    found = progress.find_divergence()
    assert found is not None
    assert found.splitlines()[0] == reason
    assert found.splitlines()[1].startswith("All ranks must ")


def test_any_two_of_many_ranks_are_enough_for_a_proof() -> None:
    progress = AttemptProgress(world_size=5, first_index=0)
    progress.on_collective(3, call())
    assert progress.find_divergence() is None
    progress.on_finished(1)
    reason = progress.find_divergence()
    assert reason is not None
    assert reason.startswith("rank 1 finished")
    assert "rank 3 waits in collective #0" in reason


# -- divergence: what looks like it


def nothing_at_all(progress: AttemptProgress) -> None: ...


def one_waits_and_the_other_still_runs(progress: AttemptProgress) -> None:
    progress.on_collective(0, call())
    progress.on_report(1, report(0))
    progress.on_report(1, report(1))


def one_saves_and_the_other_still_runs(progress: AttemptProgress) -> None:
    progress.on_report(0, save(0))


def the_other_one_finishes_after_the_last_barrier(progress: AttemptProgress) -> None:
    progress.on_collective(0, call())
    progress.on_collective(1, call())
    progress.on_finished(1)
    progress.on_report(0, report(0))


def a_finished_rank_with_its_checkpoint_being_committed(progress: AttemptProgress) -> None:
    progress.on_report(0, save(0))
    progress.on_report(1, report(0))
    progress.on_finished(1)


def a_barrier_while_the_others_checkpoint_is_being_committed(progress: AttemptProgress) -> None:
    progress.on_report(0, save(0))
    progress.on_report(1, report(0))
    progress.on_collective(1, call())


def a_finished_rank_that_reported_more_than_the_other(progress: AttemptProgress) -> None:
    for index in range(5):
        progress.on_report(1, report(index))
    progress.on_finished(1)
    progress.on_report(0, save(0))


def unequal_numbers_of_metrics(progress: AttemptProgress) -> None:
    for index in range(5):
        progress.on_report(1, report(index))
    progress.on_finished(0)


def a_barrier_with_an_own_checkpoint_pending(progress: AttemptProgress) -> None:
    progress.on_report(0, report(0, "a"))
    progress.on_collective(0, call())


def both_save_in_turn(progress: AttemptProgress) -> None:
    progress.on_report(0, save(0))
    progress.on_report(1, save(0))
    progress.on_committed(0)
    progress.on_report(1, save(1))


@pytest.mark.parametrize(
    "happens",
    [
        nothing_at_all,
        one_waits_and_the_other_still_runs,
        one_saves_and_the_other_still_runs,
        the_other_one_finishes_after_the_last_barrier,
        a_finished_rank_with_its_checkpoint_being_committed,
        a_barrier_while_the_others_checkpoint_is_being_committed,
        a_finished_rank_that_reported_more_than_the_other,
        unequal_numbers_of_metrics,
        a_barrier_with_an_own_checkpoint_pending,
        both_save_in_turn,
    ],
)
def test_a_wait_that_may_end_is_no_divergence(happens: Callable[[AttemptProgress], None]) -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    happens(progress)
    assert progress.find_divergence() is None


# -- words


def test_where_a_rank_stands_in_words() -> None:
    progress = AttemptProgress(world_size=4, first_index=0)
    progress.on_collective(0, call())
    progress.on_report(1, save(0))
    progress.on_finished(2)
    assert [each.describe() for each in progress.ranks.values()] == [
        "waits in collective #0 (barrier) at t.py:90",
        "waits for report #0 with a checkpoint at t.py:0 in f",
        "finished after 0 reports and 0 collectives",
        "runs",
    ]
