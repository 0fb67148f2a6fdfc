"""What a run has read of its datasets, as its journal tells it."""

from __future__ import annotations

from typing import Any

from drawbar.train._history.events import AttemptStarted, DatasetEpochEnded, JournaledEvent
from drawbar.train._history.ledger import DataLedger, DatasetEpoch
from drawbar.train._messages import PassEnded


def started(attempt: int, first_index: int) -> JournaledEvent:
    return AttemptStarted(
        time=0, attempt=attempt, first_report_index=first_index, resume_checkpoint=None
    )


def passed(rank: int, rows: int | None, attempt: int = 0, **fields: Any) -> JournaledEvent:
    """Rank `rank` of 2 has read so many rows of its part of 10."""
    plain: dict[str, Any] = {
        "dataset": "train",
        "epoch": 0,
        "before": [],
        "part": rank,
        "parts": 2,
        "rows": rows,
        "batches": 1,
        "shuffled": False,
        "ended": True,
        "in_all": 10,
        "uneven_rows": "drop",
    }
    return DatasetEpochEnded(
        time=0, attempt=attempt, rank=rank, shard_epoch=PassEnded(**{**plain, **fields})
    )


def only(*events: JournaledEvent) -> DatasetEpoch:
    (epoch,) = DataLedger.from_events(events)
    return epoch


def test_an_epoch_of_all_ranks() -> None:
    epoch = only(passed(0, 5), passed(1, 5))
    assert (epoch.num_rows, epoch.is_complete, epoch.row_ranges) == (10, True, ((0, 10),))
    assert (epoch.repeated_rows, epoch.unread_rows) == ((), ())


def test_rows_that_were_padded_left_out_or_not_reached() -> None:
    padded: dict[str, Any] = {"in_all": 9, "uneven_rows": "pad"}
    assert only(passed(0, 5, **padded), passed(1, 5, **padded)).repeated_rows == ((4, 5),)
    assert only(passed(0, 4, in_all=9), passed(1, 4, in_all=9)).unread_rows == ((8, 9),)
    stopped = only(passed(0, 2, ended=False), passed(1, 2, ended=False))
    assert (stopped.is_complete, stopped.unread_rows) == (False, ((2, 5), (7, 10)))
    assert not only(passed(0, 5)).is_complete  # nothing was heard of rank 1


def test_what_came_before_a_restart_counts_up_to_its_checkpoint() -> None:
    """Two workers had read two rows each at the checkpoint; then each read on, which is lost."""
    before: dict[str, Any] = {"before": [[2, 2]], "parts": 3}
    epoch = only(
        started(0, 0),
        passed(0, 5, index=1),
        started(1, 1),
        *(passed(rank, 2, attempt=1, index=1, **before) for rank in range(3)),
    )
    assert (epoch.num_rows, epoch.row_ranges) == (10, ((0, 10),))


def test_rows_that_have_no_number_are_counted() -> None:
    stream: dict[str, Any] = {"in_all": None, "before": [[4, 10]]}
    epoch = only(passed(0, 7, **stream), passed(1, 7, **stream))
    assert (epoch.num_rows, epoch.row_ranges, epoch.repeated_rows, epoch.unread_rows) == (
        54,
        None,
        None,
        None,
    )
    assert only(passed(0, None), passed(1, None)).num_rows is None


def test_of_a_whole_dataset_one_rank_is_told() -> None:
    whole: dict[str, Any] = {"part": 0, "parts": 1}
    assert only(passed(0, 10, **whole), passed(1, 3, ended=False, **whole)).num_rows == 10


def test_a_shuffle_has_read_all_in_the_end() -> None:
    shuffled: dict[str, Any] = {
        "shuffled": True,
        "before": [[2, 2, {"buffer": 4, "batch_size": 2, "seed": 1}]],
    }
    assert only(passed(0, 3, **shuffled), passed(1, 3, **shuffled)).unread_rows == ()
    part = only(passed(0, 2, ended=False, **shuffled), passed(1, 3, **shuffled))
    assert (part.num_rows, part.row_ranges) == (9, None)


def test_data_ledger_after_resize_counts_rows_dropped_before_as_read() -> None:
    """4 workers have read one of 11 rows each; the other 7 are shared by 3 workers."""
    fields: dict[str, Any] = {"in_all": 11, "before": [[4, 1]], "parts": 3}
    epoch = only(*(passed(rank, 2, **fields) for rank in range(3)))
    assert (epoch.num_rows, epoch.repeated_rows, epoch.unread_rows) == (10, (), ((10, 11),))


def test_data_ledger_of_restarted_epoch_lists_repeated_rows() -> None:
    again: dict[str, Any] = {"discarded": [[[2, 3]]]}
    epoch = only(passed(0, 5, **again), passed(1, 5, **again))
    assert (epoch.num_rows, epoch.repeated_rows, epoch.restarts) == (16, ((0, 3), (5, 8)), 1)
    unknown = only(*(passed(rank, 5, in_all=None, **again) for rank in range(2)))
    assert (unknown.num_rows, unknown.repeated_rows, unknown.restarts) == (16, None, 1)
