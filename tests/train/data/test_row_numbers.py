"""Tests of row positions: parts of ranks, and unread rows after shuffles and resizes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import ray.data

from drawbar import train
from drawbar._data.indexed import compute_split_indices
from drawbar._data.row_positions import (
    NumberedRows,
    RowPosition,
    RowsRead,
    split_rows,
)
from drawbar._data.split import check_row_counts, max_left_out_rows
from drawbar._records.events import UnevenRows
from drawbar.train import (
    DataConfig,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

SHUFFLE: dict[str, Any] = {"local_shuffle_buffer_size": 8, "local_shuffle_seed": 3}


def test_compute_split_indices_yields_parts_that_differ_by_one_row() -> None:
    assert compute_split_indices(10, 3) == [3, 6]
    assert compute_split_indices(2, 3) == [0, 1]
    assert compute_split_indices(10, 1) == []


def test_compute_split_indices_moves_to_nearest_group_start() -> None:
    assert compute_split_indices(10, 2, np.array([0, 4, 7])) == [4]
    assert compute_split_indices(10, 2, np.array([0, 1])) == [1]
    one_group = np.array([0])  # it belongs to one worker
    assert compute_split_indices(10, 3, one_group) == [0, 10]


def test_split_rows_of_few_rows() -> None:
    assert split_rows(2, 3, "pad") == ((0, 1), (0, 1), (1, 2))
    assert split_rows(0, 2, "pad") == ((0, 0), (0, 0))
    assert split_rows(2, 3, "drop") == ((0, 0), (0, 0), (0, 0))


def test_check_row_counts_accepts_one_row_that_ranks_share() -> None:
    datasets = {"train": pd.DataFrame({"id": [0]}), "valid": pd.DataFrame({"id": [0]})}
    check_row_counts(datasets, DataConfig(datasets_to_split=["valid"], uneven_rows="pad"), 2)


def test_advance_adds_rows_over_restarts_and_world_sizes() -> None:
    position = (
        RowPosition(3).advance(2, 100).advance(2, 50).advance(3, 7).advance(3, 0).advance(2, 1)
    )
    assert position == RowPosition(3, (RowsRead(2, 150), RowsRead(3, 7), RowsRead(2, 1)))


def test_row_position_survives_json() -> None:
    position = RowPosition(3, (RowsRead(2, 150), RowsRead(3, 7)))
    assert RowPosition.decode(json.loads(json.dumps(position.encode()))) == position
    assert RowPosition.decode(None) == RowPosition()


def rest(
    rows: int, read: list[RowsRead], world_size: int, uneven_rows: UnevenRows
) -> list[list[int]]:
    """Return each rank's unread rows of a dataset in blocks of three rows."""
    blocks = [min(3, rows - start) for start in range(0, rows, 3)]
    parts = NumberedRows(blocks, uneven_rows).split_unread(read, world_size)
    return [[row for segment in part for row in segment] for part in parts]


def test_rest_after_resize_includes_rows_that_drop_left_out() -> None:
    assert rest(11, [RowsRead(4, 1)], 3, "drop") == [[1, 3], [5, 7], [8, 9]]
    assert rest(11, [RowsRead(4, 2)], 3, "drop") == [[8], [9], [10]]
    assert rest(11, [RowsRead(4, 1), RowsRead(3, 1)], 2, "drop") == [[3, 7], [9, 10]]


def test_rest_after_resize_excludes_rows_that_pad_duplicated() -> None:
    assert rest(11, [RowsRead(4, 1)], 1, "pad") == [[1, 3, 4, 6, 7, 9, 10]]
    assert rest(2, [RowsRead(3, 1)], 2, "pad") == [[], []]


@pytest.mark.parametrize("uneven_rows", ["drop", "pad", "keep"])
def test_rest_without_resize_continues_each_part(uneven_rows: UnevenRows) -> None:
    first = rest(11, [], 4, uneven_rows)
    assert rest(11, [RowsRead(4, 2)], 4, uneven_rows) == [part[2:] for part in first]


def test_max_left_out_rows_adds_one_bound_for_each_world_size() -> None:
    assert max_left_out_rows([RowsRead(4, 1)], 3) == 3 + 2
    assert max_left_out_rows([RowsRead(4, 1), RowsRead(4, 2), RowsRead(3, 1)], 3) == 3 + 2
    assert max_left_out_rows([RowsRead(1, 5)], 1) == 0


def read_and_fail_once(config: dict[str, Any]) -> list[int]:
    """Read a first batch, save a checkpoint, fail, and read the rest after the restart."""
    context = train.get_context()
    shard: Any = train.get_dataset_shard("train")
    seen = []
    for batch in shard.iter_batches(batch_size=config["batch_size"], **config["options"]):
        seen += [int(row) for row in batch["id"]]
        if train.get_checkpoint() is None:
            with train.checkpoint_dir() as path:
                (path / f"rows_{context.get_world_rank()}").write_text(repr(seen))
                train.report({}, checkpoint=path)
            raise ValueError("on purpose")
    return seen


def fit(
    path: Path, dataset: Any, config: DataConfig, num_workers: int = 0, **options: Any
) -> Result:
    return DataParallelTrainer(
        read_and_fail_once,
        train_loop_config={"batch_size": options.pop("batch_size", 4), "options": options},
        datasets={"train": dataset},
        dataset_config=config,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(
            name="run",
            storage_path=path,
            failure_config=FailureConfig(max_failures=0 if num_workers else 1),
        ),
    ).fit()


def rows_before_failure(path: Path) -> list[int]:
    files = (path / "run" / "checkpoint_000000").glob("rows_*")
    return [int(row) for file in files for row in re.findall(r"\d+", file.read_text())]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("uneven_rows", ["keep", "pad"])
def test_data_ledger_after_restart_of_shuffled_exact_split_has_no_repeated_rows(
    tmp_path: Path, uneven_rows: UnevenRows
) -> None:
    dataset = ray.data.range(23, override_num_blocks=4, concurrency=1)
    result = fit(tmp_path, dataset, DataConfig(uneven_rows=uneven_rows), **SHUFFLE)
    before = rows_before_failure(tmp_path)
    assert before != [0, 1, 2, 3]
    assert sorted(before + result.return_value) == list(range(23))
    (epoch,) = result.data_ledger
    assert (epoch.num_rows, epoch.repeated_rows, epoch.unread_rows, epoch.restarts) == (
        23,
        (),
        (),
        0,
    )


@pytest.mark.usefixtures("ray_cluster")
def test_shuffled_exact_split_resumes_in_the_order_of_an_uninterrupted_epoch(
    tmp_path: Path,
) -> None:
    dataset = ray.data.range(23, override_num_blocks=4, concurrency=1)
    result = fit(tmp_path, dataset, DataConfig(uneven_rows="keep"), **SHUFFLE)

    def read_all() -> list[int]:
        batches: Any = train.get_dataset_shard("train").iter_batches(batch_size=4, **SHUFFLE)
        return [int(row) for batch in batches for row in batch["id"]]

    uninterrupted = DataParallelTrainer(
        read_all,
        datasets={"train": dataset},
        dataset_config=DataConfig(uneven_rows="keep"),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path),
    ).fit()
    assert rows_before_failure(tmp_path) + result.return_value == uninterrupted.return_value


@pytest.mark.usefixtures("ray_cluster")
def test_shuffled_exact_split_resized_inside_epoch_reads_each_row_once(tmp_path: Path) -> None:
    columns = {"id": np.arange(31), "name": [f"row {row}" for row in range(31)]}
    dataset = ray.data.from_pandas([pd.DataFrame(columns)[:13], pd.DataFrame(columns)[13:]])
    with pytest.raises(WorkerGroupError, match="on purpose"):
        fit(tmp_path, dataset, DataConfig(uneven_rows="keep"), num_workers=2, **SHUFFLE)
    before = rows_before_failure(tmp_path)
    assert len(before) == 8
    result = fit(tmp_path, dataset, DataConfig(uneven_rows="keep"), **SHUFFLE)
    assert sorted(before + result.return_value) == list(range(31))
    (epoch,) = result.data_ledger
    assert (epoch.num_rows, epoch.repeated_rows, epoch.unread_rows) == (31, (), ())


@pytest.mark.usefixtures("ray_cluster")
def test_data_ledger_after_resize_leaves_out_no_rows_dropped_before(tmp_path: Path) -> None:
    frame = pd.DataFrame({"id": range(5)})
    with pytest.raises(WorkerGroupError, match="on purpose"):
        fit(tmp_path, frame, DataConfig(), num_workers=2, batch_size=1)
    result = fit(tmp_path, frame, DataConfig(), batch_size=1)
    assert sorted(rows_before_failure(tmp_path) + result.return_value) == list(range(5))
    (epoch,) = result.data_ledger
    assert (epoch.num_rows, epoch.repeated_rows, epoch.unread_rows) == (5, (), ())


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("make", [pd.DataFrame, lambda rows: ray.data.from_items(rows)])
def test_restart_of_grouped_dataset_reports_rows_that_are_read_again(
    tmp_path: Path, make: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": row, "group": "abc"[row % 3]} for row in range(10)]
    config = DataConfig(uneven_rows="keep", group_column="group")
    result = fit(tmp_path, make(rows), config)
    assert sorted(result.return_value) == list(range(10))
    (epoch,) = result.data_ledger
    assert (epoch.num_rows, epoch.restarts) == (14, 1)
    line = r"epoch 0 restarts from its beginning, and 4 rows that were read before are read again"
    assert re.search(line, capfd.readouterr().err)
