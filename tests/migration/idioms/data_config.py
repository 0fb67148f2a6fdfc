"""`DataConfig`: datasets to split, and execution options of Ray Data."""

import ray
import ray.data

from drawbar import train
from drawbar.train import DataConfig, DataParallelTrainer, ScalingConfig


def train_func() -> list[int]:
    return [
        sum(len(batch["id"]) for batch in train.get_dataset_shard(name).iter_batches())
        for name in ("train", "test")
    ]


options = DataConfig.default_ingest_options()
options.resource_limits = options.resource_limits.copy(object_store_memory=10**8)
result = DataParallelTrainer(
    train_func,
    datasets={"train": ray.data.range(10), "test": ray.data.range(4)},
    dataset_config=DataConfig(datasets_to_split=["train"], execution_options=options),
    scaling_config=ScalingConfig(num_workers=2),
).fit()
assert result.return_value == [5, 4]
