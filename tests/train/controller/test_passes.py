"""What is said of ranks that read their datasets unequally: without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from drawbar.train._controller.batch_counts import BatchCountCheck
from drawbar.train._messages import PassEnded


def passed(part: int, batches: int, epoch: int = 0, **options: Any) -> PassEnded:
    defaults: dict[str, Any] = {"parts": 2, "ended": True, "uneven_rows": "drop", "rows": None}
    return PassEnded(
        dataset="train",
        epoch=epoch,
        before=[],
        part=part,
        batches=batches,
        shuffled=False,
        in_all=None,
        **defaults | options,
    )


def test_a_batch_more_is_told_once_and_names_both_ranks() -> None:
    passes = BatchCountCheck(2)
    assert passes.add(0, passed(0, batches=3)) == ""
    told = passes.add(1, passed(1, batches=4))
    counts = "Rank 0 read 3 batches of datasets['train'] in epoch 0, but rank 1 read 4."
    assert told.startswith(counts)
    assert 'uneven_rows="keep"' in told
    assert [passes.add(rank, passed(rank, 3 + rank, epoch=1)) for rank in (0, 1)] == ["", ""]


@pytest.mark.parametrize(
    "options", [{"uneven_rows": "keep"}, {"parts": 1}, {"ended": False}, {"batches": 0}]
)
def test_ranks_that_may_differ(options: dict[str, Any]) -> None:
    passes = BatchCountCheck(2)
    for rank in (0, 1):
        assert passes.add(rank, passed(rank, **{"batches": 3 + rank} | options)) == ""


def test_a_rank_that_gets_nothing_is_told_and_all_that_get_no_row_are_an_error() -> None:
    passes = BatchCountCheck(2)
    told = passes.add(1, passed(1, batches=0, empty="batch", epoch=3))
    assert told == "Rank 1 received no batch of datasets['train'] in epoch 3."
    passes.add(0, passed(0, batches=0, empty="row", epoch=4))
    error = r"no rank received a row of datasets\['train'\] in epoch 4"
    with pytest.raises(ValueError, match=error):
        passes.add(1, passed(1, batches=0, empty="row", epoch=4))


def test_who_is_through_with_an_epoch_that_others_are_in() -> None:
    passes = BatchCountCheck(3)
    assert passes.describe_ranks_ahead() == ""
    passes.add(2, passed(2, batches=9))
    line = "ranks that have finished epoch 0 of datasets['train']: rank 2 (9 batches)"
    assert passes.describe_ranks_ahead() == f"\n  {line}"
    for rank in (0, 1):
        passes.add(rank, passed(rank, batches=9))
    assert passes.describe_ranks_ahead() == ""
