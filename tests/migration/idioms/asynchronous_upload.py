"""Asynchronous upload: training continues while a checkpoint is uploaded."""

import os
import tempfile

from drawbar import train
from drawbar.train import Checkpoint, CheckpointUploadMode, DataParallelTrainer, ScalingConfig


def train_func() -> None:
    for step in range(3):
        folder = tempfile.mkdtemp()
        with open(os.path.join(folder, "step"), "w") as file:
            file.write(str(step))
        train.report(
            {"step": step},
            checkpoint=Checkpoint.from_directory(folder),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_dir_name=f"checkpoint_step={step}",
        )


result = DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=0)).fit()
assert result.checkpoint
assert os.path.basename(result.checkpoint.path) == "checkpoint_step=2"
assert len(result.best_checkpoints) == 3
