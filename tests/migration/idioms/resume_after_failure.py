"""A failed worker restarts the group, which resumes from the latest checkpoint."""

import os
import tempfile
from typing import Any

from drawbar import train
from drawbar.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from drawbar.train.torch import TorchTrainer


def train_func(config: dict[str, Any]) -> None:
    start, checkpoint = 0, train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder, open(os.path.join(folder, "epoch")) as file:
            start = int(file.read()) + 1
    for epoch in range(start, config["epochs"]):
        if epoch == 2 and not checkpoint:
            raise RuntimeError("a failure that does not come back")
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "epoch"), "w") as file:
                file.write(str(epoch))
            train.report({"epoch": epoch}, checkpoint=Checkpoint.from_directory(folder))


result = TorchTrainer(
    train_func,
    train_loop_config={"epochs": 4},
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(name="resumes", failure_config=FailureConfig(max_failures=1)),
).fit()
assert result.metrics == {"epoch": 3}
