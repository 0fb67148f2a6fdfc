"""Times of ranks: measuring, and finding ranks that are slower than the others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.train import runs
from drawbar.train._history.rank_times import RankTimesOfRank, find_stragglers
from drawbar.train._worker.rank_timer import MAX_PHASES, RankTimer
from drawbar.train.testing import run_in_threads
from tests.train.runs import fit


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


def test_phase_invalid_names_raise() -> None:
    with pytest.raises(ValueError, match="printable"):
        train.phase("\ud800")
    with pytest.raises(ValueError, match="printable"):
        train.phase("")
    with pytest.raises(TypeError, match="string"):
        train.phase(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="inside a training function"), train.phase("eval"):
        pass
    with pytest.raises(RuntimeError, match="inside a training function"):
        train.step()


def test_phases_and_steps_of_run_are_recorded(tmp_path: Path) -> None:
    def function() -> None:
        phase = train.phase("eval")
        for _ in range(3):
            with phase, phase:
                pass
            train.step()

        @phase
        def evaluate() -> None:
            pass

        evaluate()

    fit(function, tmp_path)
    (sample,) = runs.find_run(tmp_path / "run").read_rank_times()
    assert sample.ranks[0].steps == 3
    assert "phase:eval" in sample.ranks[0].seconds


def test_phase_of_generator_that_is_closed_after_the_run_ends_silently() -> None:
    def generate() -> Iterator[int]:
        with train.phase("load"):
            yield 1

    def function() -> None:
        generators.append(generate())
        next(generators[0])

    generators: list[Any] = []
    run_in_threads(function, num_workers=1)
    (generator,) = generators
    generator.close()


def test_rank_times_damaged_lines_are_skipped(tmp_path: Path) -> None:
    fit(train.step, tmp_path)
    file = tmp_path / "run" / "rank_times.jsonl"
    line = file.read_text()
    wrong = json.loads(line) | {"ranks": [0, 1]}
    file.write_text(f"{line}x\n{json.dumps(wrong)}\n{line}{line[:20]}")
    assert len(runs.find_run(tmp_path / "run").read_rank_times()) == 2


def test_run_whose_directory_is_deleted_keeps_the_error_of_the_user(tmp_path: Path) -> None:
    def function() -> None:
        import shutil

        # An earlier deletion would be the error of the run: the start could not be recorded.
        while '"function_started"' not in (tmp_path / "run" / "journal.jsonl").read_text():
            os.sched_yield()
        shutil.rmtree(tmp_path / "run")
        raise ValueError("error of the user")

    with pytest.raises(Exception, match="error of the user"):
        fit(function, tmp_path)
