"""A user function uploads a checkpoint to the path that the storage context names."""

import os

from drawbar import train
from drawbar.train import Checkpoint, CheckpointUploadMode, DataParallelTrainer, ScalingConfig


def train_func() -> None:
    storage = train.get_context().get_storage()
    path = storage.build_checkpoint_path_from_name("mine")

    def finish(checkpoint: Checkpoint, checkpoint_dir_name: str) -> Checkpoint:
        storage.storage_filesystem.create_dir(checkpoint.path)
        with storage.storage_filesystem.open_output_stream(f"{path}/weights") as stream:
            stream.write(b"w")
        return checkpoint

    train.report(
        {"loss": 0},
        checkpoint=Checkpoint(path),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=finish,
    )


result = DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=0)).fit()
assert result.checkpoint
assert os.path.exists(os.path.join(result.checkpoint.path, "weights"))
