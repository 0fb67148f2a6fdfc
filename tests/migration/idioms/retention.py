"""The best checkpoints by a score stay."""

import tempfile

from drawbar import train
from drawbar.train import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
)


def train_func() -> None:
    for accuracy in (0.1, 0.9, 0.5, 0.7):
        with tempfile.TemporaryDirectory() as folder:
            train.report({"accuracy": accuracy}, checkpoint=Checkpoint.from_directory(folder))


result = DataParallelTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(
        checkpoint_config=CheckpointConfig(
            num_to_keep=2,
            checkpoint_score_attribute="accuracy",
            checkpoint_score_order="max",
        )
    ),
).fit()
assert [metrics["accuracy"] for _, metrics in result.best_checkpoints] == [0.7, 0.9]
best = result.get_best_checkpoint("accuracy", "max")
assert best == result.best_checkpoints[-1][0]
