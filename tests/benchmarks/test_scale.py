"""The controller's work per message does not depend on the number of ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from benchmarks._scale import SIZES, make_rows, make_table
from benchmarks._scale_run import Meter, measure_controller

MAX_GROWTH = 1.25
"""Of the function calls per message, from 8 to 64 ranks: heaps take O(log n)."""


@pytest.fixture
def count_calls() -> Iterator[Meter]:
    """Count the Python calls in the controller's thread, which do not depend on the machine."""
    calls = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if threading.current_thread().name != "drawbar-controller":
            sys.setprofile(None)  # for this thread
        elif event == "call":
            calls += 1

    threading.setprofile(on_event)
    yield lambda: calls
    threading.setprofile(None)


def test_controller_work_per_message_is_independent_of_number_of_ranks(count_calls: Meter) -> None:
    small, large = (measure_controller(num_ranks, count_calls) for num_ranks in (8, 64))
    assert large.report <= MAX_GROWTH * small.report
    assert large.barrier / 64 <= MAX_GROWTH * small.barrier / 8
    assert large.checkpoint_work / 64 <= MAX_GROWTH * small.checkpoint_work / 8


def test_scale_table_shows_goals(count_calls: Meter) -> None:
    costs = [measure_controller(2, count_calls)] * len(SIZES)
    rows = make_rows(costs, growth=0.5, ray=None)
    assert rows[-1].format() == [
        "memory growth in 10 minutes",
        "",
        "",
        "",
        "0.5 MB",
        "<= 1 MB",
        "yes",
    ]
    assert make_table(rows).row_count == len(rows)
