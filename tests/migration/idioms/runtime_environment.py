"""Variables of the workers."""

import os

from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig


def train_func() -> str | None:
    return os.environ.get("MY_SETTING")


result = DataParallelTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(worker_runtime_env={"env_vars": {"MY_SETTING": "on"}}),
).fit()
assert result.return_value == "on"
