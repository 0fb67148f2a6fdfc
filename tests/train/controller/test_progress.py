"""AttemptProgress: rounds, assigned files, collectives, and divergence. No Ray, no files."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from drawbar._process.stalled_ranks import RankActivity
from drawbar._storage.contents import FileEntry
from drawbar.train._config.checkpoint_modes import CheckpointConsistencyMode
from drawbar.train._controller.progress import AttemptProgress, ReportRound
from drawbar.train._protocol.messages import (
    CheckpointListRequest,
    CheckpointOffer,
    CollectiveCalled,
    CollectiveKind,
    Report,
)


def report(index: int, *files: str, waits: bool = False, metrics: float = 0) -> Report:
    """Return a report. It has a checkpoint if there are files; "" makes one without any file."""
    entries = tuple(FileEntry(name, len(name)) for name in files if name)
    offer = CheckpointOffer(directory="/d", files=entries, checkpoint_name="c") if files else None
    return Report(
        index=index,
        metrics={"m": metrics},
        time=0,
        location=f"t.py:{index} in f",
        offer=offer,
        is_blocking=waits,
    )


def named(name: str, *files: str) -> Report:
    """Return a report with a checkpoint of this name."""
    unnamed = report(0, *files)
    assert unnamed.offer is not None
    return replace(unnamed, offer=replace(unnamed.offer, checkpoint_name=name))


def save(index: int) -> Report:
    """Return a report that waits for its checkpoint."""
    return report(index, "model", waits=True)


def call(sequence: int = 0, kind: CollectiveKind = "barrier") -> CollectiveCalled:
    location = f"t.py:9{sequence}"
    return CollectiveCalled(
        sequence=sequence, number=sequence, kind=kind, payload=None, location=location
    )


def assigned_paths(complete: ReportRound) -> dict[int, list[str]]:
    return {rank: [file.path for file in files] for rank, files in complete.assigned_files.items()}


def request_list(*, timed: bool = False) -> CheckpointListRequest:
    until = CheckpointConsistencyMode.COMMITTED
    return CheckpointListRequest(
        request_id=0, consistency_mode=until, has_timeout=timed, location="t.py:7"
    )


# -- the list of checkpoints


def test_next_running_report_ignores_finished_ranks() -> None:
    progress = AttemptProgress(world_size=2, first_index=4)
    progress.on_report(1, report(4))
    assert progress.next_running_report == 4
    progress.on_report(0, report(4))
    assert progress.next_running_report == 5
    progress.on_report(1, report(5))
    progress.on_finished(0)
    assert progress.next_running_report == 6
    progress.on_finished(1)
    assert progress.next_running_report == math.inf


def test_divergence_of_checkpoint_list_request_is_detected() -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    progress.on_report(1, report(0))
    progress.on_checkpoints_requested(1, request_list())
    assert progress.find_divergence() is None
    progress.on_collective(0, call())
    assert progress.find_divergence() == (
        "rank 0 waits in collective #0 (barrier) at t.py:90; "
        "rank 1 waits in get_all_reported_checkpoints() for report #0 at t.py:7\n"
        "All ranks must reach both calls, in the same order. Move them out of branches that depend "
        "on the rank."
    )
    progress.on_checkpoints_reply(1)
    assert progress.find_divergence() is None


def test_divergence_ignores_checkpoint_list_request_with_timeout() -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    progress.on_report(1, report(0))
    progress.on_checkpoints_requested(1, request_list(timed=True))
    progress.on_collective(0, call())
    assert progress.find_divergence() is None


# -- rounds


def test_round_completes_with_the_report_of_the_last_rank() -> None:
    progress = AttemptProgress(world_size=3, first_index=0)
    assert progress.on_report(0, report(0, "a")) == []
    assert progress.on_report(2, report(0)) == []
    (complete,) = progress.on_report(1, report(0, "b"))
    assert complete.index == 0
    assert assigned_paths(complete) == {0: ["a"], 1: ["b"]}
    assert sorted(complete.offers) == [0, 1]


def test_round_of_slow_rank_completes_several_rounds_in_order() -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    for index in range(3):
        assert progress.on_report(0, report(index, "a")) == []
    completed = [r.index for index in range(3) for r in progress.on_report(1, report(index))]
    assert completed == [0, 1, 2]


def test_round_of_fast_rank_waits_for_the_other_ranks() -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    assert progress.on_report(0, report(0)) == []
    assert progress.on_report(0, report(1, "a")) == []
    assert progress.on_report(1, report(0)) == []
    assert [complete.index for complete in progress.on_report(1, report(1))] == [1]


def test_round_index_starts_at_first_index() -> None:
    progress = AttemptProgress(world_size=1, first_index=7)
    assert [complete.index for complete in progress.on_report(0, report(7, "a"))] == [7]
    assert progress.ranks[0].reports == 8


def test_rounds_without_files_are_not_kept() -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    for index in range(1000):
        assert progress.on_report(0, report(index)) == []
    assert progress.on_report(1, report(0)) == []


def test_round_without_files_is_returned_if_all_rounds_are_kept() -> None:
    progress = AttemptProgress(world_size=2, first_index=0, should_keep_all_rounds=True)
    progress.on_report(1, report(0, metrics=1))
    (complete,) = progress.on_report(0, report(0, metrics=2))
    metrics = {rank: report.metrics["m"] for rank, report in complete.reports.items()}
    assert metrics == {0: 2, 1: 1}
    assert (complete.offers, complete.assigned_files) == ({}, {})


# -- assigned files


@pytest.mark.parametrize(
    ("offered", "assigned"),
    [
        ({0: ["a", "b"], 1: ["c"]}, {0: ["a", "b"], 1: ["c"]}),
        ({0: ["same"], 1: ["same"], 2: ["same"]}, {0: ["same"], 1: [], 2: []}),
        ({1: ["a", "s"], 2: ["s", "b"]}, {1: ["a", "s"], 2: ["b"]}),
        ({2: ["s", "x/y"], 0: ["s"]}, {0: ["s"], 2: ["x/y"]}),
        ({0: [""], 1: ["a"]}, {0: [], 1: ["a"]}),
        ({0: [""]}, {0: []}),
    ],
)
def test_assigned_files_come_from_the_lowest_rank(
    offered: dict[int, list[str]], assigned: dict[int, list[str]]
) -> None:
    progress = AttemptProgress(world_size=3, first_index=0)
    completed: list[ReportRound] = []
    for rank in (2, 1, 0):
        completed += progress.on_report(rank, report(0, *offered.get(rank, [])))
    assert [assigned_paths(complete) for complete in completed] == [assigned]


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
def test_find_conflict_describes_incompatible_offers(
    reports: list[Report], conflict: str | None
) -> None:
    progress = AttemptProgress(world_size=len(reports), first_index=0)
    (complete,) = [
        report_round
        for rank, reported in enumerate(reports)
        for report_round in progress.on_report(rank, reported)
    ]
    actual_conflict = complete.find_conflict()
    assert actual_conflict is None if conflict is None else conflict in str(actual_conflict)


# -- collectives


def test_collective_completes_with_the_call_of_the_last_rank() -> None:
    progress = AttemptProgress(world_size=3, first_index=0)
    assert progress.on_collective(1, call()) is None
    assert progress.on_collective(0, call()) is None
    calls = progress.on_collective(2, call())
    assert calls is not None
    assert sorted(calls) == [0, 1, 2]
    assert all(rank.awaited_collective is None for rank in progress.ranks.values())
    assert progress.on_collective(0, call(1)) is None


def test_on_finished_returns_true_for_the_last_rank() -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    assert not progress.on_finished(1)
    assert progress.on_finished(0)
    assert progress.find_divergence() is None


# -- divergence: waits that can never end


def finished_rank_then_barrier(progress: AttemptProgress) -> None:
    progress.on_finished(1)
    progress.on_collective(0, call())


def barrier_then_other_rank_finishes(progress: AttemptProgress) -> None:
    progress.on_collective(0, call())
    progress.on_finished(1)


def checkpoint_that_a_finished_rank_never_reports(progress: AttemptProgress) -> None:
    progress.on_report(1, report(0))
    progress.on_finished(1)
    progress.on_report(0, report(0))
    progress.on_report(0, save(1))


def finished_rank_without_report_for_pending_checkpoint(progress: AttemptProgress) -> None:
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


def finished_rank_against_barrier_and_pending_checkpoint(progress: AttemptProgress) -> None:
    """Let rank 1 wait in a barrier with a pending checkpoint, and rank 0 finish without both."""
    progress.on_report(1, report(0, "a"))
    progress.on_collective(1, call())
    progress.on_finished(0)


CALL_BARRIER = (
    "All ranks must call barrier() equally often. Move it out of branches that depend on the rank, "
    "and run the same number of steps on each."
)
CALL_REPORT = (
    "All ranks must call report() equally often as long as one of them reports checkpoints. Call "
    "report(metrics) without a checkpoint at the same step on the other ranks."
)
REACH_BOTH = (
    "All ranks must reach both calls, in the same order. Move them out of branches that depend on "
    "the rank."
)


@pytest.mark.parametrize(
    ("apply", "reason", "remedy"),
    [
        (
            finished_rank_then_barrier,
            "rank 1 finished after 0 reports and 0 collectives; "
            "rank 0 waits in collective #0 (barrier) at t.py:90",
            CALL_BARRIER,
        ),
        (
            barrier_then_other_rank_finishes,
            "rank 1 finished after 0 reports and 0 collectives; "
            "rank 0 waits in collective #0 (barrier) at t.py:90",
            CALL_BARRIER,
        ),
        (
            checkpoint_that_a_finished_rank_never_reports,
            "rank 1 finished after 1 report and 0 collectives, the last at t.py:0 in f; "
            "rank 0 waits for report #1 with a checkpoint at t.py:1 in f",
            CALL_REPORT,
        ),
        (
            finished_rank_without_report_for_pending_checkpoint,
            "rank 1 finished after 0 reports and 0 collectives; "
            "rank 0 has a checkpoint pending in report #0 from t.py:0 in f",
            CALL_REPORT,
        ),
        (
            different_collectives,
            "rank 0 waits in collective #0 (barrier) at t.py:90; "
            "rank 1 waits in collective #0 (all_gather) at t.py:90",
            REACH_BOTH,
        ),
        (
            barrier_against_checkpoint,
            "rank 0 waits in collective #0 (barrier) at t.py:90; "
            "rank 1 waits for report #0 with a checkpoint at t.py:0 in f",
            REACH_BOTH,
        ),
        (
            checkpoint_against_barrier,
            "rank 0 waits in collective #0 (barrier) at t.py:90; "
            "rank 1 waits for report #0 with a checkpoint at t.py:0 in f",
            REACH_BOTH,
        ),
        (
            checkpoint_against_barrier_after_one_of_each,
            "rank 0 waits for report #1 with a checkpoint at t.py:1 in f; "
            "rank 1 waits in collective #1 (barrier) at t.py:91",
            REACH_BOTH,
        ),
        (
            finished_rank_against_barrier_and_pending_checkpoint,
            "rank 0 finished after 0 reports and 0 collectives; "
            "rank 1 waits in collective #0 (barrier) at t.py:90",
            CALL_BARRIER,
        ),
    ],
)
def test_divergence_with_endless_wait_is_described(
    apply: Callable[[AttemptProgress], None], reason: str, remedy: str
) -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    apply(progress)
    assert progress.find_divergence() == f"{reason}\n{remedy}"


def test_divergence_of_two_among_many_ranks_is_detected() -> None:
    progress = AttemptProgress(world_size=5, first_index=0)
    progress.on_collective(3, call())
    assert progress.find_divergence() is None
    progress.on_finished(1)
    reason = progress.find_divergence()
    assert reason is not None
    assert reason.startswith("rank 1 finished")
    assert "rank 3 waits in collective #0" in reason


# -- divergence: waits that may end


def no_calls(progress: AttemptProgress) -> None: ...


def barrier_against_running_rank(progress: AttemptProgress) -> None:
    progress.on_collective(0, call())
    progress.on_report(1, report(0))
    progress.on_report(1, report(1))


def checkpoint_against_running_rank(progress: AttemptProgress) -> None:
    progress.on_report(0, save(0))


def rank_finishes_after_last_barrier(progress: AttemptProgress) -> None:
    progress.on_collective(0, call())
    progress.on_collective(1, call())
    progress.on_finished(1)
    progress.on_report(0, report(0))


def finished_rank_during_commit(progress: AttemptProgress) -> None:
    progress.on_report(0, save(0))
    progress.on_report(1, report(0))
    progress.on_finished(1)


def barrier_during_commit_of_other_rank(progress: AttemptProgress) -> None:
    progress.on_report(0, save(0))
    progress.on_report(1, report(0))
    progress.on_collective(1, call())


def finished_rank_with_more_reports(progress: AttemptProgress) -> None:
    for index in range(5):
        progress.on_report(1, report(index))
    progress.on_finished(1)
    progress.on_report(0, save(0))


def finished_rank_with_fewer_reports_of_metrics(progress: AttemptProgress) -> None:
    for index in range(5):
        progress.on_report(1, report(index))
    progress.on_finished(0)


def barrier_of_rank_with_pending_checkpoint(progress: AttemptProgress) -> None:
    progress.on_report(0, report(0, "a"))
    progress.on_collective(0, call())


def second_checkpoint_of_one_rank(progress: AttemptProgress) -> None:
    progress.on_report(0, save(0))
    progress.on_report(1, save(0))
    progress.on_committed(0)
    progress.on_report(1, save(1))


@pytest.mark.parametrize(
    "apply",
    [
        no_calls,
        barrier_against_running_rank,
        checkpoint_against_running_rank,
        rank_finishes_after_last_barrier,
        finished_rank_during_commit,
        barrier_during_commit_of_other_rank,
        finished_rank_with_more_reports,
        finished_rank_with_fewer_reports_of_metrics,
        barrier_of_rank_with_pending_checkpoint,
        second_checkpoint_of_one_rank,
    ],
)
def test_divergence_ignores_waits_that_may_end(apply: Callable[[AttemptProgress], None]) -> None:
    progress = AttemptProgress(world_size=2, first_index=0)
    apply(progress)
    assert progress.find_divergence() is None


# -- descriptions


def test_rank_progress_describe_names_the_blocking_call() -> None:
    progress = AttemptProgress(world_size=4, first_index=0)
    progress.on_collective(0, call())
    progress.on_report(1, save(0))
    progress.on_finished(2)
    assert [rank.describe() for rank in progress.ranks.values()] == [
        "waits in collective #0 (barrier) at t.py:90",
        "waits for report #0 with a checkpoint at t.py:0 in f",
        "finished after 0 reports and 0 collectives",
        "runs",
    ]


def test_activity_lists_running_ranks_and_their_running_waiters() -> None:
    progress = AttemptProgress(world_size=4, first_index=0)
    progress.on_collective(0, call())
    progress.on_collective(1, call())
    progress.on_finished(1)  # after a timeout of its collective
    progress.on_report(2, save(0))
    activity = progress.get_activity(dict.fromkeys(range(4), 5.0), {3: "t.py:4"})
    assert {rank: a.waiters for rank, a in activity.items()} == {0: (2,), 2: (0,), 3: (0, 2)}
    assert activity[0].waiting_in == "waits in collective #0 (barrier) at t.py:90"
    assert activity[3] == RankActivity(5.0, "", (0, 2), "t.py:4")


def test_activity_describes_lag_of_ranks_that_have_reported() -> None:
    progress = AttemptProgress(world_size=4, first_index=3)
    for rank, count in enumerate([3, 1, 2, 0]):
        for index in range(3, 3 + count):
            progress.on_report(rank, save(index))
    activity = progress.get_activity(dict.fromkeys(range(4), 5.0), {})
    assert [activity[rank].lag for rank in range(4)] == ["", "2 reports behind rank 0", "", ""]
