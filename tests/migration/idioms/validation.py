"""Checkpoints are validated in parallel with training."""

import os
import tempfile
from typing import Any

from drawbar import train
from drawbar.train import (
    Checkpoint,
    DataParallelTrainer,
    ScalingConfig,
    ValidationConfig,
    ValidationTaskConfig,
)


def validate(checkpoint: Checkpoint, factor: int = 1) -> dict[str, Any]:
    with checkpoint.as_directory() as folder, open(os.path.join(folder, "step")) as file:
        return {"score": factor * int(file.read())}


def train_func() -> list[Any]:
    for step in range(2):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "step"), "w") as file:
                file.write(str(step))
            train.report(
                {"step": step},
                checkpoint=Checkpoint.from_directory(folder),
                validation=ValidationTaskConfig(fn_kwargs={"factor": 10}) if step else True,
            )
    return [each.metrics["score"] for each in train.get_all_reported_checkpoints()]


result = DataParallelTrainer(
    train_func,
    validation_config=ValidationConfig(fn=validate),
    scaling_config=ScalingConfig(num_workers=0),
).fit()
assert result.return_value == [0, 10]
