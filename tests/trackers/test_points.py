"""Points of trackers: reductions over ranks, and the position from which a tracker continues."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.trackers import TensorBoard
from drawbar.train import FailureConfig, RunConfig, collective, get_context, report
from drawbar.train.testing import run_in_threads
from tests.trackers.event_files import Points, read_points

REDUCTIONS: Any = ("mean", "min", "max")


def run_ranks(storage: Path, *ranks: Sequence[dict[str, Any]]) -> Path:
    """Run ranks that report the given metrics, and return the run directory."""

    def function() -> None:
        for metrics in ranks[get_context().get_world_rank()]:
            report(metrics)

    config = RunConfig(name="run", storage_path=storage)
    return Path(run_in_threads(function, num_workers=len(ranks), run_config=config).path)


def track(path: Path, ranks: Any) -> Points:
    """Send a run to TensorBoard, and return the points that it shows."""
    log_dir = path.parent / f"tensorboard_{ranks}"
    TensorBoard(log_dir, ranks=ranks).send(str(path))
    return read_points(log_dir / "run")


def test_points_reduction_combines_ranks(tmp_path: Path) -> None:
    path = run_ranks(tmp_path, [{"loss": 1.0}, {"loss": 2.0}], [{"loss": 3.0}, {"loss": 4.0}])
    losses = [track(path, ranks)["loss"] for ranks in REDUCTIONS]
    assert losses == [[(0, 2.0), (1, 3.0)], [(0, 1.0), (1, 2.0)], [(0, 3.0), (1, 4.0)]]


def test_points_reduction_of_nan_on_any_rank_is_nan(tmp_path: Path) -> None:
    numbers = range(3)
    metrics = [
        [{f"nan_on_{other}": math.nan if rank == other else rank for other in numbers}]
        for rank in numbers
    ]
    path = run_ranks(tmp_path, *metrics)
    for ranks in REDUCTIONS:
        points = track(path, ranks)
        assert [len(points[f"nan_on_{rank}"]) for rank in numbers] == [1, 1, 1]
        assert all(math.isnan(value) for ((_, value),) in points.values())


def test_points_reduction_of_incomplete_round_uses_available_ranks(tmp_path: Path) -> None:
    path = run_ranks(tmp_path, [{"loss": 1.0}, {"loss": 2.0}], [{"loss": 3.0}])
    assert track(path, "mean") == {"loss": [(0, 2.0), (1, 2.0)]}


def test_points_reduction_drops_rounds_that_a_restart_replaces(tmp_path: Path) -> None:
    def function() -> None:
        context = get_context()
        rank = context.get_world_rank()
        if context.get_attempt() > 0:
            report({"loss": float(rank)})
            return
        with train.checkpoint_dir() as directory:
            (directory / "model").touch()
            report({"loss": 5.0}, checkpoint=directory)
        for _ in range(3 if rank == 0 else 0):
            report({"loss": 9.0})
        collective.barrier()
        raise RuntimeError("restart")

    config = RunConfig(
        name="run", storage_path=tmp_path, failure_config=FailureConfig(max_failures=1)
    )
    path = Path(run_in_threads(function, num_workers=2, run_config=config).path)
    assert track(path, "max") == {"loss": [(0, 5.0), (1, 1.0)]}


def test_points_of_all_ranks_have_prefixes(tmp_path: Path) -> None:
    path = run_ranks(tmp_path, [{"loss": 1.0}], [{"loss": 2.0}])
    assert track(path, "all") == {"rank_0/loss": [(0, 1.0)], "rank_1/loss": [(0, 2.0)]}


def test_points_have_numbers_only(tmp_path: Path) -> None:
    metrics = {"a": {"b": True, "c": None}, "d": [1], "e": "text", "f": 10**400, "g": 2}
    path = run_ranks(tmp_path, [metrics])
    assert track(path, 0) == {"a/b": [(0, 1.0)], "f": [(0, math.inf)], "g": [(0, 2.0)]}


@pytest.mark.parametrize(
    ("changes", "num_sent"),
    [
        ({}, 0),
        ({"next_index": {"0": 3, "1": 1}}, 4),  # from the first missing report of any rank on
        ({"next_index": {"0": 3}}, 6),
        ({"attempt": "x", "next_index": 3}, 6),
    ],
)
def test_tracker_continues_at_stored_position_or_at_start_if_it_is_damaged(
    tmp_path: Path, changes: dict[str, Any], num_sent: int
) -> None:
    """As after a process was killed that had sent points of some ranks."""
    path = run_ranks(tmp_path, *([{"loss": float(index)} for index in range(3)] for _ in range(2)))
    expected = track(path, "all")
    (state,) = (path / "trackers").glob("*.json")
    state.write_text(json.dumps({**json.loads(state.read_text()), **changes}))
    assert TensorBoard(tmp_path / "tensorboard_all", ranks="all").send(str(path)) == num_sent
    assert read_points(tmp_path / "tensorboard_all" / "run") == expected
    assert expected == {f"rank_{rank}/loss": [(0, 0.0), (1, 1.0), (2, 2.0)] for rank in range(2)}
