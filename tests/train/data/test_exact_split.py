"""Tests of materialized splits: all rows, complete groups, same shards in each attempt."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pandas as pd
import pyarrow as pa
import pytest
import ray.data

from drawbar import train
from drawbar.train import (
    DataConfig,
    DataParallelTrainer,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    collective,
)
from tests.train.data.shards import make_shards

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")  # it warns of itself

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def test_data_config_group_column_requires_keep() -> None:
    with pytest.raises(ValueError, match="group_column='q' needs workers with different"):
        DataConfig(group_column="q")


@pytest.mark.usefixtures("ray_cluster")
def test_materialized_split_restart_resumes_within_epoch() -> None:
    dataset = numbers(23)
    materialized: dict[str, Any] = {}

    def shards(workers: int, position: Any = None) -> list[Any]:
        config = DataConfig(uneven_rows="keep")
        return make_shards(dataset, workers, position, config=config, materialized=materialized)

    ranks = shards(2)
    begun = [iter(each.iter_rows()) for each in ranks]
    seen = [next(rows)["id"] for rows in begun for _ in range(3)]
    position = ranks[0].encode_position()
    for workers in (2, 3):  # each on its own
        rest = shards(workers, position)
        ids = [row["id"] for shard in rest for row in shard.iter_rows()]
        assert sorted(ids + seen) == list(range(23))
        tables = [t for each in shards(workers, position) for t in each.iter_arrow_tables()]
        assert [row for table in tables for row in table["id"].to_pylist()] == ids


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("make", [lambda rows: numbers(rows), lambda rows: one(rows)])
def test_materialized_split_with_pad_fills_shorter_shards(make: Any) -> None:
    config = DataConfig(uneven_rows="pad")
    shards = make_shards(make(7), 3, config=config)
    counts = [len(list(shard.iter_rows())) for shard in shards]
    assert counts == [len(shard) for shard in shards] == [3, 3, 3]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("make", [ray.data.from_arrow, pa.concat_tables])
@pytest.mark.parametrize("values", [["b", "a", None, "c"], [2**53 + 1, 2**53, None, 2**53 + 2]])
@pytest.mark.parametrize("is_category", [True, False])
def test_groups_of_categories_nulls_and_large_integers_stay_together(
    make: Any, values: list[Any], is_category: bool
) -> None:
    orders = [[0, 1, 2, 0], [2, 1, 3]]  # each block has its own categories
    columns = [pa.array([values[index] for index in order]) for order in orders]
    if is_category:
        columns = [column.dictionary_encode() for column in columns]
    dataset = make([pa.table({"group": column}) for column in columns])
    config = DataConfig(uneven_rows="keep", group_column="group")
    found = [
        [row["group"] for row in shard.iter_rows()]
        for shard in make_shards(dataset, 2, config=config)
    ]
    b, a, null, c = values
    assert found == [[a, a], [b, b, c, null, null]]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("make", [ray.data.from_pandas, pa.Table.from_pandas])
def test_grouped_shards_have_length_and_restart_epoch(make: Any) -> None:
    dataset = make(pd.DataFrame({"row": range(7), "group": list("babcacb")}))
    config = DataConfig(uneven_rows="keep", group_column="group")
    ranks = make_shards(dataset, 2, config=config)
    assert [len(shard) for shard in ranks] == [2, 5]
    next(iter(ranks[1].iter_rows()))
    restarted = make_shards(dataset, 2, ranks[1].encode_position(), config=config)
    assert [len(list(shard.iter_rows())) for shard in restarted] == [2, 5]


def rows_of(name: str) -> list[int]:
    """A part's rows, which are the same whichever way they are read."""
    shard: Any = train.get_dataset_shard(name)
    rows = [int(row) for batch in shard.iter_batches() for row in batch["row"]]
    tables = [table for table in shard.iter_arrow_tables() if table.num_rows]
    assert [row for table in tables for row in table["row"].to_pylist()] == rows
    return rows


def read_once_more_on_rank_1() -> tuple[list[int], list[int]]:
    """Rank 0 reads in the first attempt and is kept; rank 1 dies, and its successor reads alone."""
    context = train.get_context()
    if context.get_world_rank() == 1 or context.get_attempt() == 0:
        context.cache["rows"] = rows_of("train"), rows_of("valid")
    collective.barrier()
    if (context.get_world_rank(), context.get_attempt()) == (1, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    collective.barrier()
    rows: tuple[list[int], list[int]] = context.cache["rows"]
    return rows


@pytest.mark.usefixtures("ray_cluster")
def test_materialized_split_after_failure_has_same_rows_and_groups(tmp_path: Path) -> None:
    groups = ["b", "a", "b", "c", "a", "c", "b"]  # they lie apart
    items = [{"row": row, "group": group} for row, group in enumerate(groups)]
    config = DataConfig(datasets_to_split="all", uneven_rows="keep", group_column="group")
    result = fit(tmp_path, {"train": ray.data.from_items(items), "valid": lambda: one()}, config)
    trains, valids = zip(*result.return_values, strict=True)
    assert [{groups[row] for row in rows} for rows in trains] == [{"a"}, {"b", "c"}]
    assert sorted(trains[0] + trains[1]) == list(range(7))
    assert sorted(valids) == [[], [0]]


@pytest.mark.usefixtures("ray_cluster")
def test_group_column_with_one_worker_keeps_groups_consecutive(run_config: RunConfig) -> None:
    shuffled = pd.DataFrame({"row": range(7), "group": list("babcacb")})
    result = DataParallelTrainer(
        lambda: [rows_of("train"), rows_of("valid")],
        datasets={"train": shuffled, "valid": shuffled},
        dataset_config=DataConfig(uneven_rows="keep", group_column="group"),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    ).fit()
    (rows,) = result.return_values
    assert rows == [[1, 4, 0, 2, 6, 3, 5], list(range(7))]  # "valid" is not split


def numbers(rows: int) -> ray.data.Dataset:
    """A dataset that is computed by several tasks in one process."""
    return ray.data.range(rows, override_num_blocks=4, concurrency=1)


def one(rows: int = 1) -> ray.data.Dataset:
    """Its blocks stay pandas'."""
    return ray.data.from_pandas(pd.DataFrame([{"row": 0, "group": "x"}] * rows))


def fit(path: Path, datasets: Any, config: DataConfig) -> Result:
    return DataParallelTrainer(
        read_once_more_on_rank_1,
        datasets=datasets,
        dataset_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=path, failure_config=FailureConfig(max_failures=1)),
    ).fit()
