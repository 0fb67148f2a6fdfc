"""Goodput of hand-made journals with known answers, of random journals, and of real runs."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from drawbar import train
from drawbar._observe.goodput_meter import GoodputMeter
from drawbar._records import events
from drawbar.train import Goodput, Result, RunConfig, runs
from tests.train.event_factories import workers_started
from tests.train.runs import fit

Journal = list[events.JournaledEvent]

KILLED_DRIVER = """
import os, signal, sys, time
from pathlib import Path
from drawbar import train
from drawbar.train import runs

folder = Path(sys.argv[1])

def function():
    if train.get_checkpoint() is None:
        with train.checkpoint_dir() as path:
            train.report({"step": 0}, checkpoint=path)
        time.sleep(0.3)  # training
        train.report({"step": 1})
        while len(runs.find_run(folder / "run").list_report_rows()) < 2:
            pass  # the last report has the time at which the run was killed
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

train.DataParallelTrainer(
    function,
    scaling_config=train.ScalingConfig(num_workers=0),
    run_config=train.RunConfig(name="run", storage_path=folder),
).fit()
"""


def started(time: float) -> events.RunStarted:
    return events.RunStarted(time=time, run_id="r", name="n", config={})


def attempt(number: int, time: float, first_report: int = 0) -> events.AttemptStarted:
    return events.AttemptStarted(
        time=time, attempt=number, first_report_index=first_report, resume_checkpoint=None
    )


def function(
    number: int, ready: float, start: float, workers: int = 2, *, reports: bool = True
) -> Journal:
    return [
        msgspec.structs.replace(workers_started(workers), time=ready, attempt=number),
        *(
            events.UserFunctionStarted(time=start, attempt=number, rank=rank)
            for rank in range(workers)
        ),
        *([events.FirstReportReceived(time=start, attempt=number, rank=0)] if reports else []),
    ]


def commit(number: int, time: float, index: int, **seconds: float) -> Journal:
    return [
        events.CheckpointCommitted(
            time=time,
            attempt=number,
            index=index,
            name=f"checkpoint_{index:06d}",
            nbytes=1,
            seconds=0.1,
            metrics={},
        ),
        events.RankTimesRecorded(time=time, attempt=number, seconds=seconds, steps=index),
    ]


def failed(number: int, time: float, at: float | None = None) -> events.AttemptEnded:
    return events.AttemptEnded(
        time=time, attempt=number, cause="worker", failure_headlines=[], failure_time=at
    )


def ended(time: float, outcome: str = "finished") -> events.RunEnded:
    return events.RunEnded(time=time, outcome=outcome)


def compute_goodput(
    journal: Journal,
    *,
    now: float | None = None,
    last_report_times: dict[int, float] | None = None,
) -> Goodput:
    meter = GoodputMeter((last_report_times or {}).get)
    for event in journal:
        meter.apply(event)
    return meter.compute(now=now)


def assert_parts(goodput: Goodput, **parts: float) -> None:
    assert dict(goodput.parts) == pytest.approx(parts)


def test_goodput_of_undisturbed_run_has_no_lost_work() -> None:
    journal = [
        started(100),
        attempt(0, 101),
        *function(0, 103, 104),
        *commit(0, 120, 9, function=16, warmup=2, data_wait=3, checkpoint_blocked=1),
        events.RankTimesRecorded(
            time=134,
            attempt=0,
            steps=20,
            seconds={
                "function": 29,
                "warmup": 2,
                "data_wait": 5,
                "checkpoint_save": 1,
                "phase:e": 4,
            },
        ),
        ended(135),
    ]
    goodput = compute_goodput(journal)
    assert_parts(
        goodput,
        startup=2,
        placement=2,
        warmup=2,
        data_wait=5,
        checkpoint_blocked=1,
        productive=17,
        teardown=2,
        **{"phase:e": 4},
    )
    assert (goodput.hosted, goodput.elapsed) == pytest.approx((35, 35))
    assert goodput.goodput == pytest.approx(17 / 35)
    assert goodput.worker_seconds == pytest.approx(2 * 32)


@pytest.mark.parametrize(("workers", "requested"), [(3, 3), ("(1, 4)", 4), (0, 1), (None, 0)])
def test_requested_worker_seconds_count_hosted_time(workers: object, requested: int) -> None:
    config: dict[str, object] = {"scaling_config": {"num_workers": workers}}
    first: Journal = [msgspec.structs.replace(started(0), config=config), attempt(0, 1)]
    again: Journal = [
        msgspec.structs.replace(started(100), config=config),
        attempt(1, 101),
        ended(110),
    ]
    goodput = compute_goodput([*first, *function(0, 3, 4), *again])
    assert goodput.requested_worker_seconds == pytest.approx(requested * goodput.hosted)
    assert goodput.hosted < 20


def failed_attempt() -> Journal:
    """Attempt 0: start at 4, commit at 14, death at 19, handled at 20; attempt 1 starts at 25."""
    return [
        started(0),
        attempt(0, 1),
        *function(0, 3, 4),
        *commit(0, 14, 9, function=10, data_wait=2),
        failed(0, 20, at=19),
        attempt(1, 21, first_report=10),
        *function(1, 24, 25),
    ]


def test_goodput_of_restart_counts_lost_work_and_detection() -> None:
    goodput = compute_goodput([*failed_attempt(), ended(35)])
    assert_parts(
        goodput,
        startup=2,
        placement=2,
        productive=8 + 10,
        data_wait=2,
        lost_work=5,
        detection=1,
        restart=5,
    )


def test_goodput_of_restart_from_older_checkpoint_loses_work_of_several_attempts() -> None:
    journal = [*failed_attempt(), failed(1, 30, at=30), attempt(2, 31, first_report=5)]
    journal += [*function(2, 33, 34), ended(40)]
    parts = compute_goodput(journal).parts
    assert parts["lost_work"] == pytest.approx(15 + 5)
    assert parts["productive"] == pytest.approx(6)
    assert parts["restart"] == pytest.approx(5 + 4)


def test_goodput_of_failed_run_shows_unsaved_work_which_a_resume_loses() -> None:
    journal = [
        started(0),
        attempt(0, 1),
        *function(0, 3, 4),
        *commit(0, 14, 9, function=10),
        failed(0, 20, at=20),
        ended(22, "failed"),
    ]
    assert_parts(
        compute_goodput(journal), startup=2, placement=2, productive=10, unsaved=6, teardown=2
    )
    journal += [started(122), attempt(1, 123, first_report=10), *function(1, 125, 126), ended(130)]
    goodput = compute_goodput(journal)
    assert_parts(
        goodput,
        startup=2,
        placement=2,
        productive=14,
        lost_work=6,
        teardown=2,
        crash_gap=100,
        restart=4,
    )
    assert goodput.elapsed == pytest.approx(130)
    assert goodput.hosted == pytest.approx(30)


def test_goodput_of_killed_driver_uses_its_last_report_and_crash_gap() -> None:
    killed = [started(0), attempt(0, 0), *function(0, 0, 0), *commit(0, 10, 9)]
    last = {0: 16.0}
    assert_parts(compute_goodput(killed, last_report_times=last), productive=10, unsaved=6)
    resumed = [*killed, started(50), attempt(1, 50, first_report=10), *function(1, 52, 52)]
    goodput = compute_goodput([*resumed, ended(60)], last_report_times=last)
    assert_parts(goodput, productive=18, lost_work=6, crash_gap=34, restart=2)


def test_goodput_of_run_stopped_by_user_has_pause() -> None:
    journal = [started(0), attempt(0, 0), *function(0, 0, 0), *commit(0, 10, 9)]
    journal += [ended(12, "stopped"), started(1012), attempt(1, 1012, first_report=10)]
    goodput = compute_goodput([*journal, *function(1, 1013, 1013), ended(1020)])
    assert goodput.paused == pytest.approx(1000)
    assert_parts(goodput, productive=17, lost_work=2, startup=1)


def test_goodput_without_reports_checkpoints_and_steps_is_unknown() -> None:
    begin = [started(0), attempt(0, 0), *function(0, 0, 1, reports=False)]
    for goodput in (compute_goodput(begin, now=31), compute_goodput([*begin, ended(31)])):
        assert (goodput.goodput, goodput.effective) == (None, None)
        assert_parts(goodput, startup=1, unreported=30)
        assert "goodput unknown" in str(goodput)
    for report in (commit(0, 31, 0), [msgspec.structs.replace(ended(31), num_reports=1)]):
        goodput = compute_goodput([*begin, *report, *([] if len(report) == 1 else [ended(31)])])
        assert goodput.goodput == goodput.shares["productive"] == pytest.approx(30 / 31)


def test_goodput_of_active_run_counts_until_now() -> None:
    journal = [started(0), attempt(0, 1), *function(0, 3, 4)]
    assert_parts(compute_goodput(journal, now=10), startup=2, placement=2, productive=6)
    assert_parts(compute_goodput(journal[:2], now=3), startup=1, placement=2)


def test_goodput_with_clock_set_back_counts_the_rest() -> None:
    journal = [started(10_000), attempt(0, 10_000), *function(0, 10_002, 10_002)]
    journal += [*commit(0, 10_012, 9), *commit(0, 5_000, 19), *commit(0, 5_010, 29), ended(5_020)]
    assert_parts(compute_goodput(journal), placement=2, productive=30)


def test_goodput_of_stalled_ranks_is_averaged() -> None:
    journal = [started(0), attempt(0, 0), *function(0, 0, 0)]
    journal += [events.RanksStalled(time=10, attempt=0, descriptions={1: "x"})]
    journal += [events.RanksStalled(time=20, attempt=0, descriptions={}), ended(30)]
    assert_parts(compute_goodput(journal), stalled=5, productive=25)


def recovered(time: float, seconds: float) -> events.RanksRecovered:
    return events.RanksRecovered(
        time=time,
        attempt=0,
        ranks=[1],
        num_deaths=1,
        failure_headlines=["rank 1: killed"],
        failure_time=time - seconds,
        stopped_seconds=seconds,
    )


def test_goodput_of_recovery_in_place_excludes_time_in_which_ranks_were_stopped() -> None:
    journal = [started(0), attempt(0, 0), *function(0, 0, 0), recovered(10, 2), recovered(20, 1)]
    assert_parts(compute_goodput([*journal, ended(30)]), recovery=3, productive=27)


def make_random_journal(seed: int) -> tuple[Journal, float, float]:
    """Return events in any order, the last time, and the sum of the positive differences."""
    rng = random.Random(seed)
    now, total, journal = 1_000.0, 0.0, Journal()
    for number in range(rng.randrange(1, 40)):
        seconds = rng.choice([0, 0.5, 3, 20, -5, -1000])
        now += seconds
        total += max(seconds, 0)
        journal += make_random_events(rng, number, now)
    return journal, now, total


def make_random_events(rng: random.Random, number: int, now: float) -> Journal:
    times = {key: rng.uniform(0, 9) for key in ("function", "data_wait", "phase:x", "warmup")}
    choices: list[Callable[[], Journal]] = [
        lambda: [started(now)],
        lambda: [attempt(number, now, rng.randrange(number + 1))],
        lambda: function(number, now, now + rng.uniform(-50, 50)),
        lambda: commit(rng.randrange(number + 1), now, number, **times),
        lambda: [failed(number, now, at=rng.choice([None, now - 3, now + 3]))],
        lambda: [events.RanksStalled(time=now, attempt=0, descriptions={0: "", 1: ""})],
        lambda: [recovered(now, rng.uniform(-5, 50))],
        lambda: [ended(now, rng.choice(["finished", "failed", "stopped"]))],
    ]
    return rng.choice(choices)()


def test_goodput_of_any_journal_has_positive_parts_that_sum_to_at_most_its_time() -> None:
    for seed in range(300):
        journal, last_time, total = make_random_journal(seed)
        for now in (None, last_time):
            goodput = compute_goodput(journal, now=now)
            assert all(seconds > 0 for seconds in goodput.parts.values()), seed
            assert goodput.elapsed + goodput.paused <= total + 1e-3, seed
            assert 0 <= (goodput.effective or 0) <= (goodput.goodput or 0) <= 1, seed
            assert sum(goodput.shares.values()) == pytest.approx(1 if goodput.hosted else 0), seed
            if "productive" in goodput.parts:
                assert goodput.shares["productive"] == goodput.goodput, seed


def compute_journal_seconds(journal: Journal) -> float:
    """Return the time of a journal: all positive differences, but not jumps of the clock back."""
    last, total = None, 0.0
    for event in journal:
        if isinstance(event, events.UserFunctionStarted | events.FirstReportReceived):
            continue  # its time is from the clock of a node
        if last is None or event.time < last - 30:
            last = event.time
        total += max(event.time - last, 0.0)
        last = max(event.time, last)
    return total


def test_goodput_of_any_journal_has_parts_that_sum_to_its_time() -> None:
    for seed in range(300):
        journal, _, _ = make_random_journal(seed)
        goodput = compute_goodput(journal)
        seconds = compute_journal_seconds(journal)
        assert goodput.elapsed + goodput.paused == pytest.approx(seconds, abs=1e-3), seed


def test_goodput_of_journal_without_start_of_attempt_sums_to_its_time() -> None:
    parts = compute_goodput([started(0), failed(0, 5), attempt(1, 6), ended(10)]).parts
    assert sum(parts.values()) == pytest.approx(10)


def test_goodput_of_killed_driver_and_resume_has_crash_gap(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED_DRIVER)
    command = [sys.executable, str(script), str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    killed = float((tmp_path / "killed").read_text())
    run = runs.find_run(tmp_path / "run")
    saved = run.list_checkpoints()[0].time
    before = run.goodput
    assert before.parts["unsaved"] == pytest.approx(killed - saved, abs=0.2)

    begin = time.time()
    assert subprocess.run(command, check=False).returncode == 0
    goodput = runs.find_run(tmp_path / "run").goodput
    assert goodput.parts["lost_work"] == pytest.approx(before.parts["unsaved"])
    assert "unsaved" not in goodput.parts
    assert goodput.parts["crash_gap"] >= begin - killed
    assert goodput.parts["restart"] > 0
    assert goodput == Result.from_path(tmp_path / "run").goodput
    assert goodput.elapsed == pytest.approx(sum(goodput.parts.values()))


def test_goodput_with_old_times_of_ranks_extends_them_to_the_commit() -> None:
    journal = [started(0), attempt(0, 0), *function(0, 0, 0)]
    journal += [*commit(0, 20, 9, function=10, data_wait=4, warmup=1), failed(0, 20, at=20)]
    goodput = compute_goodput([*journal, ended(20, "failed")])
    assert_parts(goodput, data_wait=8, warmup=1, productive=11)


def test_goodput_of_real_run_has_no_gap_and_is_the_same_everywhere(tmp_path: Path) -> None:
    live: list[Goodput] = []

    def train_func() -> None:
        for step in range(6):
            with train.phase("eval"):
                time.sleep(0.02)
            time.sleep(0.01)  # a training step
            with train.checkpoint_dir() as path:
                (path / "step").write_text(str(step))
                train.report({"step": step}, checkpoint=path)
        live.append(runs.find_run(tmp_path / "run").goodput)

    begin = time.time()
    result = fit(train_func, tmp_path)
    elapsed = time.time() - begin
    goodput = result.goodput
    assert not goodput.parts.keys() & {"lost_work", "restart", "unsaved", "crash_gap"}
    assert goodput.parts["phase:eval"] >= 0.12
    assert goodput.parts["productive"] >= 0.05
    assert goodput.hosted == goodput.elapsed <= elapsed
    # All except what `fit()` does before it opens the run directory and after the run.
    last = runs.find_run(tmp_path / "run")
    assert goodput.elapsed == pytest.approx(
        (last.last_event_time or math.inf) - (last.start_time or 0), abs=1e-3
    )
    assert last.goodput == Result.from_path(tmp_path / "run").goodput == goodput
    assert live[0].elapsed <= goodput.elapsed
    assert "goodput" in str(goodput)


@pytest.mark.usefixtures("ray_cluster")
def test_goodput_after_kill_of_worker_has_lost_work(run_config: RunConfig) -> None:
    def train_func() -> dict[str, Any]:
        context = train.get_context()
        resumed = train.get_checkpoint()
        times = {"start": time.time()}
        for step in itertools.count(1 if resumed is None else 3):
            if step == 3 and resumed is None and context.get_world_rank() == 1:
                (Path(context.get_storage().storage_fs_path) / "killed").write_text(
                    str(time.time())
                )
                os.kill(os.getpid(), signal.SIGKILL)
            with train.checkpoint_dir() as path:
                (path / f"rank_{context.get_world_rank()}").touch()
                train.report({"step": step}, checkpoint=path if step == 1 else None)
            if step == 4:
                break
            train.collective.barrier()
            time.sleep(0.05)  # training
        return times

    result = fit(train_func, run_config, num_workers=2, max_failures=1)
    parts = result.goodput.parts
    killed = float((Path(result.path).parent / "killed").read_text())
    first, second = result.timeline.attempts
    assert first.end_time is not None
    assert second.function_start_time is not None
    commit_time = runs.find_run(result.path).list_checkpoints()[0].time
    # The death is known to the sentinel within a fraction of a second.
    lost = parts["lost_work"] + parts.get("detection", 0.0)
    assert lost == pytest.approx(first.end_time - commit_time, abs=0.05)
    assert parts["lost_work"] >= killed - commit_time - 0.05
    assert parts["restart"] == pytest.approx(second.function_start_time - first.end_time, abs=0.05)
    assert sum(parts.values()) == pytest.approx(result.goodput.elapsed)


def test_goodput_of_handle_is_live_and_in_the_end_that_of_the_result(tmp_path: Path) -> None:
    started, release = tmp_path / "started", tmp_path / "release"
    os.mkfifo(started)
    os.mkfifo(release)

    def train_func() -> None:
        started.write_text("")
        release.read_text()

    trainer = train.DataParallelTrainer(
        train_func,
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path),
    )
    run = trainer.start()
    started.read_text()
    first = run.goodput()
    second = run.goodput()
    release.write_text("")
    result = run.wait()
    assert first.elapsed <= second.elapsed <= result.goodput.elapsed + 1e-3
    assert run.goodput() == result.goodput
