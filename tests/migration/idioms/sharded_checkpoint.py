"""Every rank saves its part; they become one checkpoint."""

import os
import tempfile

from drawbar import train
from drawbar.train import Checkpoint, DataParallelTrainer, ScalingConfig


def train_func() -> None:
    rank = train.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, f"model-rank={rank}.pt"), "w") as file:
            file.write(str(rank))
        train.report({"rank": rank}, checkpoint=Checkpoint.from_directory(folder))


result = DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit()
assert result.checkpoint
copy = result.checkpoint.to_directory()
assert {"model-rank=0.pt", "model-rank=1.pt"} <= set(os.listdir(copy))
