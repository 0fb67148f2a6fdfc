"""Tests of the soak test of data loaders: a fixed part of it, and what its oracle reports."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import _soak_accelerate, _soak_lightning, _soak_transformers
from benchmarks._soak import FRAMEWORKS, check_scenario
from benchmarks._soak_oracle import Outcome, find_violations
from benchmarks._soak_restarts import check_restarts
from benchmarks._soak_run import Pass
from benchmarks._soak_scenario import Attempt, Scenario, draw_scenario

SEED = 1
SCENARIOS = 30
FRAMEWORK_SEED = 7
FRAMEWORK_SCENARIOS = 8  # one scenario of Lightning has two ranks


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[pytest.mark.nightly] if number % 3 else [])
        for number in range(SCENARIOS)
    ],
)
def test_loader_in_random_scenario_behaves_as_documented(number: int) -> None:
    scenario = draw_scenario(SEED, number)
    assert check_scenario(scenario) == [], scenario


@pytest.mark.usefixtures("keep_environment", "ray_cluster")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's
@pytest.mark.parametrize(
    "framework", [_soak_accelerate, _soak_lightning, _soak_transformers], ids=FRAMEWORKS
)
@pytest.mark.nightly
def test_framework_in_random_scenarios_repeats_steps_of_uninterrupted_run(framework: Any) -> None:
    for number in range(FRAMEWORK_SCENARIOS):
        violations, description = check_restarts(framework, FRAMEWORK_SEED, number)
        assert violations == [], description


def test_draw_scenario_with_equal_seeds_returns_equal_scenarios() -> None:
    assert draw_scenario(1, 2) == draw_scenario(1, 2) != draw_scenario(1, 3)


SEQUENTIAL = Scenario(
    sampler="sequential", samples=5, batch_size=1, epochs=1, attempts=(Attempt(world_size=2),)
)


@pytest.mark.parametrize(
    ("ranks", "violation"),
    [
        ([[0, 2, 4], [1, 3, 0]], None),
        ([[0, 2], [1, 3]], "1 items are missing"),
        ([[0, 2, 4], [1, 3]], "different numbers of batches"),
        ([[1, 2, 4], [0, 3, 0]], "the order differs"),
        ([[0, 2, 4, 1], [1, 3, 0, 2]], "3 items are repeated"),
    ],
)
def test_find_violations_reports_lost_and_repeated_samples(
    ranks: list[list[int]], violation: str | None
) -> None:
    part = [[Pass("train", 0, 3, [[item] for item in items])] for items in ranks]
    order = Pass("train", 0, None, [[item] for item in range(5)])
    found = list(find_violations(SEQUENTIAL, Outcome([part], {"train": [order]}, None)))
    assert len(found) == (violation is not None)
    assert all(violation in each for each in found if violation)


def test_find_violations_with_dropped_samples_accepts_one_less_than_ranks() -> None:
    scenario = Scenario(sampler="sequential", samples=5, batch_size=1, drop_last=True)
    part = [[Pass("train", 0, 2, [[0], [2]])], [Pass("train", 0, 2, [[1], [3]])]]
    order = Pass("train", 0, None, [[item] for item in range(5)])
    assert list(find_violations(scenario, Outcome([part], {"train": [order]}, None))) == []
