"""Points of trackers: reductions over ranks, and cursors."""

from __future__ import annotations

import math

import pytest

from drawbar.trackers._cursor import Cursor
from drawbar.trackers._points import Ranks, get_numbers, make_point_maker
from drawbar.train.runs import AttemptRow, ReportRow


def make_rounds(ranks: Ranks, values: list[list[float]]) -> list[tuple[int, dict[str, float]]]:
    """Return the points for one list of values per rank, of which the last rank reports first."""
    maker = make_point_maker(ranks)
    list(maker.start_attempt(AttemptRow(0, 0, len(values))))
    points = [
        point
        for rank in reversed(range(len(values)))
        for index, value in enumerate(values[rank])
        for point in maker.add(ReportRow(0, rank, index, 1.0, {"loss": value}))
    ]
    return [(point.index, point.values) for point in [*points, *maker.finish()]]


@pytest.mark.parametrize(
    ("ranks", "expected"), [("mean", [2.0, 3.0]), ("min", [1.0, 2.0]), ("max", [3.0, 4.0])]
)
def test_points_reduction_combines_ranks(ranks: Ranks, expected: list[float]) -> None:
    rounds = make_rounds(ranks, [[1.0, 2.0], [3.0, 4.0]])
    assert rounds == [(index, {"loss": value}) for index, value in enumerate(expected)]


@pytest.mark.parametrize("ranks", ["mean", "min", "max"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_points_reduction_of_nan_on_any_rank_is_nan(ranks: Ranks, rank: int) -> None:
    values = [[1.0], [2.0], [3.0]]
    values[rank] = [math.nan]
    ((_, metrics),) = make_rounds(ranks, values)
    assert math.isnan(metrics["loss"])


def test_points_reduction_of_incomplete_round_uses_available_ranks() -> None:
    assert make_rounds("mean", [[1.0, 2.0], [3.0]]) == [(0, {"loss": 2.0}), (1, {"loss": 2.0})]


def test_points_reduction_drops_rounds_that_a_restart_replaces() -> None:
    maker = make_point_maker("max")
    list(maker.start_attempt(AttemptRow(0, 0, 2)))
    assert [p for i in range(3) for p in maker.add(ReportRow(0, 0, i, 1.0, {"x": i}))] == []
    points = list(maker.start_attempt(AttemptRow(1, 1, 2)))
    assert [(point.index, point.attempt) for point in points] == [(0, 0)]
    assert list(maker.finish()) == []


def test_points_of_all_ranks_have_prefixes() -> None:
    assert make_rounds("all", [[1.0], [2.0]]) == [
        (0, {"rank_1/loss": 2.0}),
        (0, {"rank_0/loss": 1.0}),
    ]


def test_points_get_numbers_keeps_numbers_only() -> None:
    metrics = {"a": {"b": True, "c": None}, "d": [1], "e": "text", "f": 10**400, "g": 2}
    assert get_numbers(metrics) == {"a/b": 1.0, "f": math.inf, "g": 2.0}


def test_cursor_go_back_resends_from_first_missing_report_of_any_rank() -> None:
    cursor = Cursor(attempt=2, first_index=4, num_keys=2, next_index={0: 9, 1: 7}, end=9)
    assert cursor.go_back() == Cursor(2, 4, 2, {0: 7, 1: 7}, 7)
    assert Cursor(2, 4, 2, {0: 9}, 9).go_back() == Cursor(2, 4, 2, {}, 4)
    assert Cursor.from_json(cursor.to_json()) == cursor


def test_cursor_from_damaged_state_is_start() -> None:
    assert Cursor.from_json({"attempt": "x", "next_index": 3}) == Cursor()
