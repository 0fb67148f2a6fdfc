"""The storage is a filesystem of pyarrow."""

import os

import pyarrow.fs

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig

home = os.path.expanduser("~")
filesystem = pyarrow.fs.SubTreeFileSystem(home, pyarrow.fs.LocalFileSystem())


def train_func() -> None:
    with train.checkpoint_dir() as folder:
        (folder / "weights").write_text("w")
        train.report({}, checkpoint=folder)


result = DataParallelTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(name="run", storage_path="results", storage_filesystem=filesystem),
).fit()
assert result.checkpoint
assert result.filesystem.get_file_info(f"{result.checkpoint.path}/weights").is_file
assert os.path.exists(f"{home}/results/run")
