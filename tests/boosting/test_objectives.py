"""Objectives have the same loss on several workers as in one process."""

from __future__ import annotations

import pytest

from benchmarks._objective_rows import OBJECTIVES, ORDERS, Order
from benchmarks._objectives import compare

BY_NAME = {objective.name: objective for objective in OBJECTIVES}


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        *(("survival:aft", 1e-5), ("reg:quantileerror", 0.05)),
        *(("poisson", 0.01), ("multiclass", 0.01), ("mape", 0.05)),
    ],
)
def test_loss_on_several_workers_is_that_of_one_process(name: str, tolerance: float) -> None:
    differences = [compare(BY_NAME[name], order, 3, rows=1000) for order in ORDERS]
    assert differences == pytest.approx([0] * len(ORDERS), abs=tolerance)


@pytest.mark.parametrize(("name", "order"), [("rank:ndcg", "weighted"), ("survival:cox", "sorted")])
def test_objective_that_needs_one_worker_raises(name: str, order: Order) -> None:
    assert "Set num_workers=1" in str(compare(BY_NAME[name], order, 2, rows=200))
