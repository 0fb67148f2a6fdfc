"""Rows that a run has read of its datasets, according to journals written by the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drawbar.train import DatasetEpoch, Result

Event = dict[str, Any]
BuildEpoch = Callable[..., DatasetEpoch]


def start_attempt(attempt: int, first_index: int) -> Event:
    return {
        "event": "attempt_started",
        "time": 0,
        "attempt": attempt,
        "first_report_index": first_index,
        "resume_checkpoint": None,
    }


def end_epoch(rank: int, rows: int | None, attempt: int = 0, **fields: Any) -> Event:
    """Return the event of one of 2 ranks that read `rows` rows of its shard of a 10-row dataset."""
    shard_epoch: dict[str, Any] = {
        "dataset": "train",
        "epoch": 0,
        "previous_reads": [],
        "shard_index": rank,
        "num_shards": 2,
        "num_rows": rows,
        "num_batches": 1,
        "is_shuffled": False,
        "is_complete": True,
        "total_rows": 10,
        "uneven_rows": "drop",
    }
    return {
        "event": "dataset_pass",
        "time": 0,
        "attempt": attempt,
        "rank": rank,
        "shard_epoch": {"type": "ShardEpochEnded", **shard_epoch, **fields},
    }


@pytest.fixture
def build_epoch(tmp_path: Path) -> BuildEpoch:
    """Return a function that reads the only epoch of a run whose journal has these events."""

    def build_epoch(*events: Event) -> DatasetEpoch:
        start = {"event": "run_started", "time": 0, "run_id": "r", "name": "run", "config": {}}
        lines = [json.dumps(event) + "\n" for event in (start, *events)]
        (tmp_path / "journal.jsonl").write_text("".join(lines))
        (epoch,) = Result.from_path(tmp_path).data_ledger
        return epoch

    return build_epoch


def test_ledger_of_complete_epoch_counts_all_rows(build_epoch: BuildEpoch) -> None:
    epoch = build_epoch(end_epoch(0, 5), end_epoch(1, 5))
    assert (epoch.num_rows, epoch.is_complete, epoch.row_ranges) == (10, True, ((0, 10),))
    assert (epoch.repeated_rows, epoch.unread_rows) == ((), ())


def test_ledger_lists_repeated_and_unread_rows(build_epoch: BuildEpoch) -> None:
    padded: dict[str, Any] = {"total_rows": 9, "uneven_rows": "pad"}
    assert build_epoch(end_epoch(0, 5, **padded), end_epoch(1, 5, **padded)).repeated_rows == (
        (4, 5),
    )
    assert build_epoch(
        end_epoch(0, 4, total_rows=9), end_epoch(1, 4, total_rows=9)
    ).unread_rows == ((8, 9),)
    stopped = build_epoch(end_epoch(0, 2, is_complete=False), end_epoch(1, 2, is_complete=False))
    assert (stopped.is_complete, stopped.unread_rows) == (False, ((2, 5), (7, 10)))
    assert not build_epoch(end_epoch(0, 5)).is_complete  # rank 1 has not ended the epoch


def test_ledger_after_restart_counts_rows_up_to_checkpoint(build_epoch: BuildEpoch) -> None:
    """Each of two workers read two rows before the checkpoint; rows read after it are lost."""
    before: dict[str, Any] = {"previous_reads": [[2, 2]], "num_shards": 3}
    epoch = build_epoch(
        start_attempt(0, 0),
        end_epoch(0, 5, report_index=1),
        start_attempt(1, 1),
        *(end_epoch(rank, 2, attempt=1, report_index=1, **before) for rank in range(3)),
    )
    assert (epoch.num_rows, epoch.row_ranges) == (10, ((0, 10),))


def test_ledger_of_stream_counts_rows_without_numbers(build_epoch: BuildEpoch) -> None:
    stream: dict[str, Any] = {"total_rows": None, "previous_reads": [[4, 10]]}
    epoch = build_epoch(end_epoch(0, 7, **stream), end_epoch(1, 7, **stream))
    assert (epoch.num_rows, epoch.row_ranges, epoch.repeated_rows, epoch.unread_rows) == (
        54,
        None,
        None,
        None,
    )
    assert build_epoch(end_epoch(0, None), end_epoch(1, None)).num_rows is None


def test_ledger_of_unsplit_dataset_counts_one_rank(build_epoch: BuildEpoch) -> None:
    unsplit: dict[str, Any] = {"shard_index": 0, "num_shards": 1}
    assert (
        build_epoch(
            end_epoch(0, 10, **unsplit), end_epoch(1, 3, is_complete=False, **unsplit)
        ).num_rows
        == 10
    )


def test_ledger_of_shuffled_epoch_is_known_only_when_complete(build_epoch: BuildEpoch) -> None:
    shuffled: dict[str, Any] = {
        "is_shuffled": True,
        "previous_reads": [[2, 2, {"buffer_size": 4, "batch_size": 2, "seed": 1}]],
    }
    assert build_epoch(end_epoch(0, 3, **shuffled), end_epoch(1, 3, **shuffled)).unread_rows == ()
    incomplete = build_epoch(
        end_epoch(0, 2, is_complete=False, **shuffled), end_epoch(1, 3, **shuffled)
    )
    assert (incomplete.num_rows, incomplete.row_ranges) == (9, None)


def test_ledger_after_resize_counts_rows_dropped_before_as_read(build_epoch: BuildEpoch) -> None:
    """4 workers have read one of 11 rows each; 3 workers share the other 7."""
    fields: dict[str, Any] = {"total_rows": 11, "previous_reads": [[4, 1]], "num_shards": 3}
    epoch = build_epoch(*(end_epoch(rank, 2, **fields) for rank in range(3)))
    assert (epoch.num_rows, epoch.repeated_rows, epoch.unread_rows) == (10, (), ((10, 11),))


def test_ledger_of_restarted_epoch_lists_repeated_rows(build_epoch: BuildEpoch) -> None:
    restarted: dict[str, Any] = {"discarded": [[[2, 3]]]}
    epoch = build_epoch(end_epoch(0, 5, **restarted), end_epoch(1, 5, **restarted))
    assert (epoch.num_rows, epoch.repeated_rows, epoch.restarts) == (16, ((0, 3), (5, 8)), 1)
    unknown = build_epoch(*(end_epoch(rank, 5, total_rows=None, **restarted) for rank in range(2)))
    assert (unknown.num_rows, unknown.repeated_rows, unknown.restarts) == (16, None, 1)
