"""Tests of map_style: PyTorch map-style datasets as trainer datasets."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from drawbar import train
from drawbar.train import DataConfig, DataParallelTrainer, RunConfig, ScalingConfig
from tests.train.data.shards import make_shards, take


class Squares(torch.utils.data.Dataset[dict[str, Any]]):
    """So many numbers and their squares, made when they are asked for."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"id": number, "square": torch.tensor(float(number**2))}


@pytest.mark.parametrize(
    "shuffle", [{}, {"local_shuffle_buffer_size": 30, "local_shuffle_seed": 7}]
)
def test_map_style_resume_resized_creates_items_once(
    shuffle: dict[str, int],
) -> None:
    position, seen = None, list[int]()
    for workers, rows in ((2, 10), (3, 20), (3, 10), (2, 1000)):
        ranks = [
            take(each, rows, **shuffle) for each in make_shards(Squares(1000), workers, position)
        ]
        position = ranks[0][1]
        seen += [each for ids, _ in ranks for each in ids]
    assert sorted(seen) == list(range(1000))
    assert bool(shuffle) == (seen[:10] != list(range(10)))
    assert position == {"epoch": 1, "read": []}


def test_map_style_batches_match_data_loader() -> None:
    (shard,) = make_shards(Squares(5), 1)
    batches = list(shard.iter_torch_batches(batch_size=2, drop_last=True))
    assert [batch["square"].tolist() for batch in batches] == [[0, 1], [4, 9]]
    assert [row["id"] for row in shard.iter_rows()] == [0, 1, 2, 3, 4]
    assert len(shard.iter_torch_batches(batch_size=2)) == 3
    assert shard.count() == len(shard) == 5
    pairs = TensorDataset(torch.arange(4), torch.arange(4) * 2)
    (shard,) = make_shards(pairs, 1)
    assert [(x.tolist(), y.tolist()) for x, y in shard.iter_torch_batches(batch_size=3)] == [
        ([0, 1, 2], [0, 2, 4]),
        ([3], [6]),
    ]


@pytest.mark.usefixtures("ray_cluster")  # its datasets are kept in Ray, also of no workers
def test_local_mode_dataset_reports_rows_read(run_config: RunConfig) -> None:
    def function() -> list[int]:
        shard: Any = train.get_dataset_shard("train")
        return [number for batch in shard.iter_torch_batches() for number in batch["id"].tolist()]

    result = DataParallelTrainer(
        function,
        datasets={"train": Squares(300)},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    ).fit()
    assert result.return_value == list(range(300))
    (epoch,) = result.data_ledger
    assert (epoch.num_rows, epoch.repeated_rows, epoch.unread_rows, epoch.num_batches) == (
        300,
        (),
        (),
        {0: 2},
    )


@pytest.mark.usefixtures("ray_cluster")
def test_map_style_worker_without_torch_import_creates_batches(run_config: RunConfig) -> None:
    def function() -> list[Any]:
        assert "torch" not in sys.modules
        shard: Any = train.get_dataset_shard("train")
        return [batch.tolist() for (batch,) in shard.iter_torch_batches(batch_size=2)]

    result = DataParallelTrainer(
        function,
        datasets={"train": TensorDataset(torch.arange(3))},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=run_config,
    ).fit()
    assert result.return_value == [[0, 1], [2]]


def test_map_style_with_columns_option_raises() -> None:
    config = DataConfig(uneven_rows="keep", group_column="id")
    with pytest.raises(ValueError, match=r"with columns, but .* is a PyTorch dataset \(Squares\)"):
        make_shards(Squares(3), 1, config=config)


def test_map_style_shuffle_gives_each_worker_a_random_sample() -> None:
    config = DataConfig(uneven_rows="keep", datasets_to_shuffle=["train"])
    shards = make_shards(Squares(1000), 2, config=config)
    parts = [[row["id"] for row in shard.iter_rows()] for shard in shards]
    assert sorted(parts[0] + parts[1]) == list(range(1000))
    assert sum(parts[0]) / 500 == pytest.approx(500, rel=0.1)
