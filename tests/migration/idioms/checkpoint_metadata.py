"""A checkpoint has metadata."""

import tempfile

from drawbar import train
from drawbar.train import Checkpoint, DataParallelTrainer, ScalingConfig


def train_func() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint.from_directory(folder)
        checkpoint.set_metadata({"classes": ["cat", "dog"]})
        checkpoint.update_metadata({"version": 2})
        train.report({}, checkpoint=checkpoint)


result = DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=0)).fit()
assert result.checkpoint
assert result.checkpoint.get_metadata() == {"classes": ["cat", "dog"], "version": 2}
