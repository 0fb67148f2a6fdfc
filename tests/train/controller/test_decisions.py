"""Decisions of the controller, without Ray: restarts, resumes, root causes, and stalled ranks."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from drawbar._base.frames import find_user_frames
from drawbar._process.collective_calls import (
    GroupCalls,
    find_collective_waits,
    find_missing_ranks,
)
from drawbar._process.stack import Frame, Stack
from drawbar._process.stack_comparison import Stacks, format_difference
from drawbar._process.stalled_ranks import RankActivity, find_stalled_ranks, find_suspects
from drawbar._process.worker_failure import sort_root_cause_first
from drawbar._records.batch_counts import BatchCountCheck
from drawbar._records.events import AttemptEndCause, ShardEpochEnded
from drawbar._recovery import decisions
from drawbar._recovery.decisions import (
    GiveUp,
    Restart,
    decide_after_failure,
    startup_delay,
)
from drawbar._recovery.resume import RunDirectoryState, decide_resume, list_config_changes
from drawbar.train import (
    Backend,
    BackendConfig,
    DataParallelTrainer,
    FailureConfig,
    PreemptionError,
    ResumeError,
    RunConfig,
    ScalingConfig,
    WorkerFailure,
)
from drawbar.train._controller.failures import AttemptFailure, make_training_failed_error
from drawbar.train._protocol.messages import WorkerDied
from drawbar.train.backend import BackendWorkerGroup

NONE, UNFINISHED, FINISHED, DAMAGED = RunDirectoryState


@pytest.mark.parametrize(
    ("cause", "budget"),
    [
        ("worker", "max_failures"),
        ("hang", "max_failures"),
        ("preemption", "max_preemption_failures"),
        ("startup", "max_startup_failures"),
    ],
)
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_after_failure_restarts_until_budget_is_used(
    cause: AttemptEndCause, budget: str, limit: int
) -> None:
    config = FailureConfig(**{budget: limit})  # type: ignore[arg-type]  # the key varies
    failure_counts = Counter[AttemptEndCause]()
    for number in range(limit):
        decision = decide_after_failure(cause, failure_counts, config)
        assert decision == Restart(Counter({cause: number + 1}))
        assert isinstance(decision, Restart)
        failure_counts = decision.failure_counts
    assert decide_after_failure(cause, failure_counts, config) == GiveUp(
        f"FailureConfig.{budget}={limit} is used up"
        if limit
        else f"restarts are off. FailureConfig({budget}=3) allows 3"
    )


@pytest.mark.parametrize("cause", ["worker", "hang"])
@pytest.mark.parametrize("limit", [0, 2])
def test_after_failure_leaves_restart_to_launcher(cause: AttemptEndCause, limit: int) -> None:
    config = FailureConfig(max_failures=limit)
    assert decide_after_failure(cause, Counter(), config, has_launcher=True) == GiveUp(
        "restarts are left to your launcher (torchrun: --max-restarts)"
    )


@pytest.mark.parametrize("cause", ["worker", "hang", "preemption", "startup"])
def test_after_failure_with_limit_minus_one_always_restarts(cause: AttemptEndCause) -> None:
    config = FailureConfig(max_failures=-1, max_preemption_failures=-1, max_startup_failures=-1)
    failure_counts = Counter[AttemptEndCause]({cause: 10**6})
    assert decide_after_failure(cause, failure_counts, config) == Restart(
        Counter({cause: 10**6 + 1})
    )


@pytest.mark.parametrize("cause", ["configuration", "divergence", "storage"])
def test_after_failure_gives_up_on_permanent_errors(cause: AttemptEndCause) -> None:
    config = FailureConfig(max_failures=-1, max_preemption_failures=-1, max_startup_failures=-1)
    assert decide_after_failure(cause, Counter(), config) == GiveUp(
        "it would fail again in the same way"
    )


def test_resize_does_not_use_a_failure_budget() -> None:
    none_left = FailureConfig(max_failures=0, max_preemption_failures=0, max_startup_failures=0)
    assert decide_after_failure("resize", Counter(), none_left) == Restart(Counter())


def test_failure_budgets_are_independent() -> None:
    failure_counts = Counter[AttemptEndCause]({"preemption": 5, "startup": 5})
    decision = decide_after_failure("worker", failure_counts, FailureConfig(max_failures=1))
    assert decision == Restart(Counter({"worker": 1, "preemption": 5, "startup": 5}))
    assert failure_counts == Counter({"preemption": 5, "startup": 5})


@pytest.mark.parametrize("cause", ["worker", "hang"])
def test_failed_workers_and_hangs_share_a_budget(cause: AttemptEndCause) -> None:
    failure_counts = Counter[AttemptEndCause]({"worker": 1, "hang": 1})
    config = FailureConfig(max_failures=3)
    decision = decide_after_failure(cause, failure_counts, config)
    assert isinstance(decision, Restart)
    assert decision.budget == "max_failures: 0 of 3 left"
    assert isinstance(decide_after_failure(cause, decision.failure_counts, config), GiveUp)


@pytest.mark.parametrize(
    ("failed_starts", "seconds"),
    [(0, 0), (1, 2), (2, 4), (3, 8), (5, 32), (6, 60), (7, 60), (10**6, 60)],
)
def test_startup_delay_doubles_up_to_a_minute(failed_starts: int, seconds: float) -> None:
    assert startup_delay(failed_starts) == seconds


class Broken(Backend):
    """Fail each start and count them."""

    starts: ClassVar[list[int]] = []

    def on_start(self, worker_group: BackendWorkerGroup, backend_config: Any) -> None:
        self.starts.append(len(self.starts))
        raise OSError("the registry does not respond")


class BrokenConfig(BackendConfig):
    backend_cls = Broken


def test_stop_while_waiting_for_next_start_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # If stop() did not end the wait, the test would not end either.
    monkeypatch.setattr(decisions, "STARTUP_DELAY_SECONDS", 36_000.0)
    monkeypatch.setattr(decisions, "MAX_STARTUP_DELAY_SECONDS", 36_000.0)
    monkeypatch.setattr(Broken, "starts", [])
    run = DataParallelTrainer(
        lambda: None,
        backend_config=BrokenConfig(),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path),
    ).start()
    output = ""
    while "Starting them again in 36000 s (startup failure 1)" not in output:
        output += capfd.readouterr().err
    assert "The workers did not start (OSError: the registry does not respond)" in output
    run.stop()
    assert run.wait().return_values == []
    assert run.status == "stopped"
    assert Broken.starts == [0]


# -- resume


AUTO_FROM_CHECKPOINT = "training continues from checkpoint c"
AUTO_FROM_START = "training continues from the beginning, since it has no checkpoint"


@pytest.mark.parametrize(
    ("state", "latest", "resume", "warning"),
    [
        (NONE, None, "auto", ""),
        (NONE, None, "never", ""),
        (UNFINISHED, "c", "auto", ""),
        (UNFINISHED, None, "auto", ""),
        (UNFINISHED, "c", "must", ""),
        (FINISHED, "c", "auto", f"has already finished; {AUTO_FROM_CHECKPOINT}"),
        (FINISHED, None, "auto", f"has already finished; {AUTO_FROM_START}"),
        (FINISHED, "c", "must", f"has already finished; {AUTO_FROM_CHECKPOINT}"),
        (DAMAGED, "c", "auto", f"has damaged parts; {AUTO_FROM_CHECKPOINT}"),
        (DAMAGED, None, "auto", f"has damaged parts; {AUTO_FROM_START}"),
        (DAMAGED, "c", "must", f"has damaged parts; {AUTO_FROM_CHECKPOINT}"),
    ],
)
def test_resume_plan_warns_about_finished_and_damaged_runs(
    state: RunDirectoryState, latest: str | None, resume: Any, warning: str
) -> None:
    found = decide_resume(state, resume, path="/runs/a", latest=latest)
    assert warning in found
    assert bool(found) is bool(warning)


@pytest.mark.parametrize(
    ("state", "latest", "resume", "message"),
    [
        (NONE, None, "must", r'there is no run in /runs/a\. .* set resume="auto" to start one'),
        (UNFINISHED, "c", "never", r"/runs/a contains an unfinished run\. Choose another name"),
        (UNFINISHED, None, "never", r"/runs/a contains an unfinished run\. Choose another name"),
        (UNFINISHED, None, "must", r"/runs/a has no intact checkpoint\. Set resume"),
        (FINISHED, "c", "never", r"/runs/a contains a finished run\. Choose another name"),
        (FINISHED, None, "never", r"/runs/a contains a finished run\. Choose another name"),
        (FINISHED, None, "must", r"/runs/a has no intact checkpoint\. Set resume"),
        (DAMAGED, "c", "never", r"/runs/a contains a run with damaged parts\. Choose another"),
        (DAMAGED, None, "never", r"/runs/a contains a run with damaged parts\. Choose another"),
        (DAMAGED, None, "must", r"/runs/a has no intact checkpoint\. Set resume"),
    ],
)
def test_resume_plan_with_conflicting_directory_names_the_remedy(
    state: RunDirectoryState, latest: str | None, resume: Any, message: str
) -> None:
    with pytest.raises(ResumeError, match=f'RunConfig.resume="{resume}", but .*{message}'):
        decide_resume(state, resume, path="/runs/a", latest=latest)


@pytest.mark.parametrize("state", [FINISHED, DAMAGED])
def test_resume_plan_with_conflicting_functions_needs_must(state: RunDirectoryState) -> None:
    def decide(resume: Any) -> str:
        return decide_resume(state, resume, path="/runs/a", latest="c", conflict=("f", "g"))

    with pytest.raises(ResumeError, match="training function f, but this trainer has g"):
        decide("auto")
    assert AUTO_FROM_CHECKPOINT in decide("must")


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        ({}, {}, []),
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a: 1 -> 2"]),
        ({"a": 1}, {"b": "x"}, ["a: 1 -> None", "b: None -> 'x'"]),
        ({"a": {"b": {"c": 1}, "d": 2}}, {"a": {"b": {"c": 3}, "d": 2}}, ["a.b.c: 1 -> 3"]),
        ({"a": {"b": 1}}, {"a": 5}, ["a: {'b': 1} -> 5"]),
    ],
)
def test_list_config_changes_names_changed_keys(before: Any, now: Any, changes: list[str]) -> None:
    assert list_config_changes(before, now) == changes


# -- root cause of a failed attempt


def at(time: float, rank: int, kind: Any = "exception") -> WorkerFailure:
    return WorkerFailure(rank=rank, kind=kind, type_name="E", message="", time=time)


@pytest.mark.parametrize(
    ("failures", "ranks"),
    [
        ([at(2, 0), at(1, 1)], [1, 0]),
        ([at(1, 3), at(1, 2)], [2, 3]),
        ([at(1.0, 0), at(1.05, 1, "died")], [1, 0]),  # the broken connection was seen first
        ([at(1.0, 0), at(1.2, 1, "died")], [0, 1]),
        ([], []),
    ],
)
def test_sort_root_cause_first_prefers_deaths(
    failures: list[WorkerFailure], ranks: list[int]
) -> None:
    assert [failure.rank for failure in sort_root_cause_first(failures)] == ranks


TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    "message",
    [
        "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41379",
        "Gloo all-reduce failed: Connection reset by peer",
        "NCCL error: remote process exited or there was a network error",
        "UNAVAILABLE: Collective ops is aborted by: Socket closed",
    ],
)
def test_root_cause_of_lost_connection_waits_for_peer_death(message: str) -> None:
    async def has_waited() -> bool:
        failure = WorkerFailure(rank=0, kind="exception", type_name="RuntimeError", message=message)
        attempt_failure = AttemptFailure("worker", [failure])
        task = asyncio.create_task(attempt_failure.wait_for_root_cause(TIMEOUT_S))
        is_waiting = not (await asyncio.wait([task], timeout=0.1))[0]
        attempt_failure.on_message(1, WorkerDied(detail="SIGKILL", time=0.0))
        await task
        return is_waiting

    assert asyncio.run(has_waited())


def test_root_cause_of_plain_exception_does_not_wait() -> None:
    async def is_done() -> bool:
        failure = WorkerFailure(rank=0, kind="exception", type_name="ValueError", message="boom")
        task = asyncio.create_task(
            AttemptFailure("worker", [failure]).wait_for_root_cause(TIMEOUT_S)
        )
        return bool((await asyncio.wait([task], timeout=TIMEOUT_S))[0])

    assert asyncio.run(is_done())


def test_preemption_after_a_checkpoint_without_budget_raises_preemption_error() -> None:
    error = make_training_failed_error(
        AttemptFailure("preemption"), reason="no budget", path="/runs/a", recoverable="Resume it."
    )
    assert isinstance(error, PreemptionError)
    assert str(error) == (
        "a node of the workers was lost or is being removed\n\n"
        "The run ends: no budget.\nRun directory: /runs/a\nResume it."
    )


# -- stalled ranks


HERE = Stack(frames=(Frame("/home/me/train.py", 10, "step"),), text="")
THERE = Stack(frames=(Frame("/home/me/train.py", 12, "step"),), text="")
BUSY_HERE = Stack(frames=HERE.frames, text="", cpu_seconds=0.2)
STOPPED = Stack(text="", stopped_reason="stopped (state T): kill -CONT 7 on node")


@pytest.mark.parametrize(
    ("before", "now", "stalled"),
    [
        ({0: HERE, 1: HERE}, {0: HERE, 1: HERE}, []),  # both compute, or both wait
        ({0: HERE, 1: HERE}, {0: HERE, 1: THERE}, []),  # one moves
        ({0: HERE, 1: None}, {0: THERE, 1: None}, [1]),
        ({0: HERE, 1: None}, {0: THERE, 1: STOPPED}, [1]),
        ({0: HERE, 1: THERE, 2: HERE}, {0: HERE, 1: THERE, 2: HERE}, [1]),
        ({0: HERE, 1: THERE}, {0: HERE, 1: THERE}, [0, 1]),
    ],
)
def test_find_stalled_ranks_with_idle_ranks_returns_unchanged_outliers(
    before: Stacks, now: Stacks, stalled: list[int]
) -> None:
    all_idle = dict.fromkeys(now, RankActivity(31))
    assert list(find_stalled_ranks(all_idle, 30, before, now)) == stalled
    one_active = {**all_idle, 0: RankActivity(1)}
    assert find_stalled_ranks(one_active, 30, before, now) == {}


@pytest.mark.parametrize(
    ("now", "stalled"), [({1: HERE}, [1]), ({1: BUSY_HERE}, []), ({1: THERE}, []), ({1: None}, [])]
)
def test_find_stalled_ranks_behind_others_returns_unchanged_ones(
    now: Stacks, stalled: list[int]
) -> None:
    activity = {0: RankActivity(1), 1: RankActivity(31, lag="12 reports behind rank 0")}
    assert find_suspects(activity, 30) == {1}
    found = find_stalled_ranks(activity, 30, {1: HERE}, now)
    assert list(found) == stalled
    assert [rank.text for rank in found.values()] == [
        "rank 1 has shown no activity for 31 s and is 12 reports behind rank 0: it is at "
        "/home/me/train.py:10 in step"
    ] * len(stalled)
    waiting = replace(activity[1], waiting_in="waits in collective #0 (barrier) at t.py:90")
    assert find_suspects({0: activity[0], 1: waiting}, 30) == set()


@pytest.mark.parametrize(
    ("now", "returned", "stalled"),
    [
        (HERE, (0,), [1]),
        (HERE, (), []),  # none, or one returned only now
        (THERE, (0,), []),
    ],
)
def test_find_stalled_ranks_after_others_returned_returns_unchanged_ones(
    now: Stack, returned: tuple[int, ...], stalled: list[int]
) -> None:
    found = find_stalled_ranks({1: RankActivity(31)}, 30, {1: HERE}, {1: now}, returned)
    assert list(found) == stalled
    assert [rank.text for rank in found.values()] == [
        "rank 1 has shown no activity for 31 s, and rank 0 has finished: it is at "
        "/home/me/train.py:10 in step"
    ] * len(stalled)


def calls(names: str, waiting_in: int | None = None, group: str = "0 (gloo)") -> GroupCalls:
    """Return the calls of a rank: a letter is a collective; the first one has the number 1."""
    return GroupCalls(group, (), dict(enumerate(names, 1)), waiting_in)


@pytest.mark.parametrize(
    ("ranks", "texts", "missing"),
    [
        ([[calls("aab")], [calls("aab")]], [], set()),  # no rank waits
        ([[calls("aab", 3)], []], ["rank 0 waits in b #3"], set()),  # rank 1 has sent nothing
        ([[calls("aab", 3)], [calls("aab", 3)]], ["ranks 0, 1 (2) wait in b #3"], set()),
        (  # rank 0 has called two more, which is usual on GPUs
            [[calls("aabab", 3)], [calls("aa")]],
            ["rank 1 never entered b #3, in which rank 0 waits"],
            {1},
        ),
        ([[calls("a", 1)], [calls("")]], ["rank 1 never entered a #1, in which rank 0 waits"], {1}),
        (  # rank 1 has completed the wrong collective, and waits in the next one
            [[calls("aab", 3)], [calls("acab", 4)], [calls("aab", 3)]],
            ["ranks 0, 2 (2) entered a #2, but rank 1 entered c #2"],
            set(),
        ),
        (  # ranks 1 and 2 wait for each other in two groups
            [
                [calls("a", 1)],
                [calls(""), calls("b", 1, "1 (gloo)")],
                [calls("a", 1), calls("", None, "1 (gloo)")],
            ],
            [
                "rank 1 never entered a #1, in which ranks 0, 2 (2) wait",
                "rank 2 never entered b #1, in which rank 1 waits",
            ],
            {1, 2},
        ),
        (  # rank 1 waits only for rank 2
            [[calls("a", 1)], [calls(""), calls("b", 1, "1")], [calls(""), calls("", None, "1")]],
            [
                "ranks 1, 2 (2) never entered a #1, in which rank 0 waits",
                "rank 2 never entered b #1, in which rank 1 waits",
            ],
            {2},
        ),
    ],
)
def test_find_collective_waits_names_missing_ranks_and_first_difference(
    ranks: list[list[GroupCalls]], texts: list[str], missing: set[int]
) -> None:
    waits = find_collective_waits(dict(enumerate(ranks)))
    assert [wait.text.partition(" (process group")[0] for wait in waits] == texts
    assert find_missing_ranks(waits) == missing


def test_find_stalled_ranks_returns_rank_that_never_entered_collective() -> None:
    stacks = {
        0: msgspec.structs.replace(HERE, collective_calls=(calls("aab", 3),)),
        1: msgspec.structs.replace(THERE, collective_calls=(calls("aa"),)),
    }
    found = find_stalled_ranks(dict.fromkeys(stacks, RankActivity(31)), 30, stacks, stacks)
    assert list(found) == [1]
    assert found[1].text == (
        "rank 1 has shown no activity for 31 s: it is at /home/me/train.py:12 in step; "
        "rank 1 never entered b #3, in which rank 0 waits (process group 0 (gloo))"
    )


def test_format_difference_puts_smallest_group_first() -> None:
    def at(line: int) -> Stack:
        return Stack(frames=(Frame("/home/me/train.py", line, "step"),), text="")

    difference = format_difference({0: at(10), 1: at(12), 2: at(10), 3: None})
    assert difference.splitlines()[-1] == "  ranks 0, 2 (2): /home/me/train.py:10 in step"
    assert "rank 1: /home/me/train.py:12 in step" in difference
    assert "rank 3: does not respond" in difference


def test_find_user_frames_excludes_files_of_drawbar() -> None:
    # Find the modules without importing them: drawbar.torch imports PyTorch.
    specs = [importlib.util.find_spec(f"drawbar.{name}") for name in ("train", "torch")]
    drawbar_files = [spec.origin for spec in specs if spec is not None and spec.origin]
    assert len(drawbar_files) == 2
    libraries = [*drawbar_files, threading.__file__, "<frozen os>"]
    assert find_user_frames([*libraries, "/home/me/train.py", *libraries]) == [len(libraries)]
    assert find_user_frames(libraries) == []


# -- numbers of batches of the ranks


def shard_epoch(shard: int, batches: int, epoch: int = 0, **options: Any) -> ShardEpochEnded:
    defaults: dict[str, Any] = {
        "num_shards": 2,
        "is_complete": True,
        "uneven_rows": "drop",
        "num_rows": None,
    }
    return ShardEpochEnded(
        dataset="train",
        epoch=epoch,
        previous_reads=[],
        shard_index=shard,
        num_batches=batches,
        is_shuffled=False,
        total_rows=None,
        **defaults | options,
    )


def test_batch_counts_that_differ_warn_once_with_both_ranks() -> None:
    check = BatchCountCheck(2)
    assert check.add(0, shard_epoch(0, batches=3)) == ""
    warning = check.add(1, shard_epoch(1, batches=4))
    counts = "Rank 0 read 3 batches of datasets['train'] in epoch 0, but rank 1 read 4."
    assert warning.startswith(counts)
    assert 'uneven_rows="keep"' in warning
    assert [check.add(rank, shard_epoch(rank, 3 + rank, epoch=1)) for rank in (0, 1)] == ["", ""]


@pytest.mark.parametrize(
    "options", [{"uneven_rows": "keep"}, {"num_shards": 1}, {"is_complete": False}, {"batches": 0}]
)
def test_batch_counts_with_allowed_differences_do_not_warn(options: dict[str, Any]) -> None:
    check = BatchCountCheck(2)
    for rank in (0, 1):
        assert check.add(rank, shard_epoch(rank, **{"batches": 3 + rank} | options)) == ""


def test_batch_counts_without_batches_warn_and_without_rows_raise() -> None:
    check = BatchCountCheck(2)
    warning = check.add(1, shard_epoch(1, batches=0, missing_unit="batch", epoch=3))
    assert warning == "Rank 1 received no batch of datasets['train'] in epoch 3."
    check.add(0, shard_epoch(0, batches=0, missing_unit="row", epoch=4))
    error = r"no rank received a row of datasets\['train'\] in epoch 4"
    with pytest.raises(ValueError, match=error):
        check.add(1, shard_epoch(1, batches=0, missing_unit="row", epoch=4))


def test_describe_ranks_ahead_lists_ranks_that_finished_the_epoch() -> None:
    check = BatchCountCheck(3)
    assert check.describe_ranks_ahead() == ""
    check.add(2, shard_epoch(2, batches=9))
    line = "ranks that have finished epoch 0 of datasets['train']: rank 2 (9 batches)"
    assert check.describe_ranks_ahead() == f"\n  {line}"
    for rank in (0, 1):
        check.add(rank, shard_epoch(rank, batches=9))
    assert check.describe_ranks_ahead() == ""
