"""Tests of `drawbar verify --trajectory`, which compares the curves of two runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.cli._trajectory import Curve, compare_curves, make_curves, relative_difference
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig
from tests.cli.conftest import Command


def make_run(storage: Path, name: str, *losses: float, first_step: int = 1) -> None:
    def function() -> None:
        for step, loss in enumerate(losses, start=first_step):
            train.report({"loss": loss, "step": step, "text": "none", "val": {"acc": step / 10}})

    DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name=name, storage_path=storage),
    ).fit()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    storage = tmp_path_factory.mktemp("runs")
    make_run(storage, "four", 1.0, 0.5, 0.25, 0.125)
    make_run(storage, "same", 1.0, 0.500001, 0.25)
    make_run(storage, "other", 1.0, 0.5, 0.3, 0.2)
    make_run(storage, "late", 0.5, 0.25, 0.125, first_step=2)
    return storage


def test_verify_trajectory_of_equal_runs_exits_with_0(cli: Command, runs: Path) -> None:
    result = cli("verify", runs / "same", "--trajectory", runs / "four")
    assert result.code == 0, result.err
    assert result.out.splitlines() == [
        "loss: equal at 3 steps, largest relative difference 2e-06",
        "step: equal at 3 steps, largest relative difference 0",
        "val/acc: equal at 3 steps, largest relative difference 0",
    ]
    assert cli("verify", "--trajectory", runs / "four", runs / "same").out == result.out
    strict = cli("verify", runs / "same", "--trajectory", runs / "four", "--tolerance", "1e-7")
    assert strict.code == 1


def test_verify_trajectory_prints_first_step_that_differs(cli: Command, runs: Path) -> None:
    arguments = "verify", runs / "other", "--trajectory", runs / "four", "--metric", "loss"
    result = cli(*arguments)
    assert (result.code, result.out) == (
        1,
        "loss: differs first at report 2 by 0.17 (relative)  "
        "other: 0.3 (attempt 0, 1 worker), four: 0.25 (attempt 0, 1 worker)\n",
    )
    (metric,) = json.loads(cli(*arguments, "--json").out)["metrics"]
    assert metric["first_difference"]["step"] == 2
    assert metric["first_difference"]["values"] == [0.3, 0.25]
    assert metric["max_difference"] == pytest.approx(0.375)


def test_verify_trajectory_names_metrics_that_one_run_lacks(cli: Command, tmp_path: Path) -> None:
    for name, number in (("both", 4), ("half", 2)):

        def function(number: int = number) -> None:
            for step in range(4):
                train.report({"step": step, **({"loss": 1.0} if step < number else {})})

        DataParallelTrainer(
            function,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name=name, storage_path=tmp_path),
        ).fit()
    make_run(tmp_path, "more", 1.0, 1.0, 1.0, 1.0, first_step=0)
    half = cli("verify", tmp_path / "half", "--trajectory", tmp_path / "both")
    assert half.code == 1
    assert "loss: differs first at report 2 by inf (relative)  half: missing" in half.out
    more = cli("verify", tmp_path / "both", "--trajectory", tmp_path / "more")
    assert (more.code, more.out.splitlines()[-1]) == (1, "val/acc: missing in both")


def test_verify_trajectory_by_step_compares_common_steps(cli: Command, runs: Path) -> None:
    arguments = "verify", runs / "late", "--trajectory", runs / "four"
    assert cli(*arguments).code == 1
    by_step = cli(*arguments, "--step", "step")
    assert "loss: differs first at step 1 by inf (relative)  late: missing, four: 1" in by_step.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metric", "text"], "--metric text is not a number in both runs. Metrics of both runs"),
        (["--step", "missing"], "have no numeric metric at the same missing"),
    ],
)
def test_verify_trajectory_without_common_values_exits_with_2(
    cli: Command, runs: Path, arguments: list[str], message: str
) -> None:
    result = cli("verify", runs / "same", "--trajectory", runs / "four", *arguments)
    assert result.code == 2
    assert message in result.err


def test_verify_with_metric_but_without_trajectory_exits_with_2(cli: Command, runs: Path) -> None:
    result = cli("verify", runs / "same", "--metric", "loss")
    assert result.code == 2
    assert "need --trajectory RUN" in result.err


def test_make_curves_uses_lowest_rank_and_last_value_of_a_step() -> None:
    rows: list[dict[str, Any]] = [
        {"rank": 1, "index": 0, "attempt": 0, "time": 1.0, "loss": 3.0, "step": 1},
        {"rank": 2, "index": 0, "attempt": 0, "time": 1.0, "loss": 9.0, "step": 1},
        {"rank": 0, "index": 1, "attempt": 1, "time": 2.0, "loss": 2.0, "step": 1, "on": True},
    ]
    assert make_curves(rows, None)["loss"] == {0: (3.0, 0), 1: (2.0, 1)}
    assert make_curves(rows, "step") == {"loss": {1: (2.0, 1)}}
    assert make_curves(rows, "loss")["step"] == {3.0: (1.0, 0), 2.0: (1.0, 1)}


def test_make_curves_keeps_fractional_steps_and_skips_nan() -> None:
    epochs = (0.25, 0.5, math.nan)
    rows: list[dict[str, Any]] = [
        {"rank": 0, "index": index, "attempt": 0, "time": 1.0, "loss": 1.0, "epoch": epoch}
        for index, epoch in enumerate(epochs)
    ]
    assert list(make_curves(rows, "epoch")["loss"]) == [0.25, 0.5]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (0.0, 0.0, 0.0),
        (-1.0, 1.0, 2.0),
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (None, 1.0, math.inf),
    ],
)
def test_relative_difference(first: float | None, second: float | None, expected: float) -> None:
    assert relative_difference(first, second) == expected


def test_compare_curves_names_skipped_step_but_not_missing_end() -> None:
    complete: dict[str, Curve] = {"loss": {step: (1.0, 0) for step in range(5)}}
    shorter: dict[str, Curve] = {"loss": {step: (1.0, 0) for step in range(3)}}
    with_gap: dict[str, Curve] = {"loss": {step: (1.0, 2) for step in (0, 2, 3)}}
    (comparison,) = compare_curves([complete, shorter], ["loss"], 0.0)
    assert (comparison.num_steps, comparison.first_difference) == (3, None)
    (comparison,) = compare_curves([complete, with_gap], ["loss"], 0.0)
    assert comparison.first_difference is not None
    assert comparison.first_difference.step == 1
    assert comparison.first_difference.values == (1.0, None)
    assert comparison.max_difference == 0.0
