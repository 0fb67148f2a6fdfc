"""Positions and old habits in the configs."""

import warnings
from typing import Any

from drawbar.train import (
    TRAIN_DATASET_KEY,
    CheckpointConfig,
    DataParallelTrainer,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
)

assert TRAIN_DATASET_KEY == "train"


def train_func() -> str:
    return "done"


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer = DataParallelTrainer(
        train_func,
        train_loop_config={"lr": 0.1},
        scaling_config=ScalingConfig(trainer_resources=None, num_workers=0, use_tpu=False),
        run_config=RunConfig(
            "named",
            None,
            failure_config=FailureConfig(1, controller_failure_limit=-1),
            checkpoint_config=CheckpointConfig(1, "loss", "min"),
            logging_config=LoggingConfig("ERROR"),
        ),
    )
assert any("does not receive the config" in str(warning.message) for warning in caught)
assert trainer.fit().return_value == "done"

old: Any = RunConfig
try:
    old(verbose=0)
except TypeError as error:
    assert "LoggingConfig" in str(error)
