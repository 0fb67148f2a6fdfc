"""A subclass of DataConfig splits in its own way."""

from typing import Any

import ray
import ray.data

from drawbar import train
from drawbar.train import DataConfig, DataParallelTrainer, ScalingConfig


class MyDataConfig(DataConfig):
    def configure(
        self,
        datasets: Any,
        world_size: int,
        worker_handles: Any = None,
        worker_node_ids: Any = None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        parts = datasets["train"].streaming_split(
            world_size, equal=True, locality_hints=worker_node_ids
        )
        return [{"train": part} for part in parts]


def train_func() -> int:
    return sum(1 for _ in train.get_dataset_shard("train").iter_rows())


result = DataParallelTrainer(
    train_func,
    datasets={"train": ray.data.range(10)},
    dataset_config=MyDataConfig(),
    scaling_config=ScalingConfig(num_workers=2),
).fit()
assert result.return_value == 5
