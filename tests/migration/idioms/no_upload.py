"""Files that a framework has written into the storage are committed in place."""

import os

from drawbar import train
from drawbar.train import Checkpoint, CheckpointUploadMode, DataParallelTrainer, ScalingConfig


def train_func() -> None:
    storage = train.get_context().get_storage()
    path = os.path.join(storage.experiment_fs_path, "written")
    os.makedirs(path)
    with open(os.path.join(path, "weights"), "w") as file:
        file.write("w")
    train.report(
        {"loss": 0},
        checkpoint=Checkpoint(path),
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


result = DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=0)).fit()
assert result.checkpoint
assert os.path.basename(result.checkpoint.path) == "written"
