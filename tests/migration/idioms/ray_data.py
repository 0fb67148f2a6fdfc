"""Ray Data, split between the workers and streamed as tensors."""

import ray
import ray.data

from drawbar import train
from drawbar.train import ScalingConfig
from drawbar.train.torch import TorchTrainer


def train_func() -> int:
    rows = 0
    shard = train.get_dataset_shard("train")
    for batch in shard.iter_torch_batches(batch_size=8):
        rows += len(batch["id"])
    return rows


result = TorchTrainer(
    train_func,
    datasets={"train": ray.data.range(64)},
    scaling_config=ScalingConfig(num_workers=2),
).fit()
assert result.return_value == 32
