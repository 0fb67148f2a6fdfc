"""BatchCountCheck: warnings for ranks that read different numbers of batches."""

from __future__ import annotations

from typing import Any

import pytest

from drawbar.train._controller.batch_counts import BatchCountCheck
from drawbar.train._protocol.messages import ShardEpochEnded


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
