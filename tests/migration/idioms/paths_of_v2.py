"""Scripts that import from `ray.train.v2`, and give a run a name with folders in it."""

import os

from drawbar.train.v2.api.config import RunConfig, ScalingConfig  # type: ignore[import-untyped]
from drawbar.train.v2.api.data_parallel_trainer import DataParallelTrainer  # type: ignore[import-untyped]
from drawbar.train.v2.api.result import Result  # type: ignore[import-untyped]
from drawbar.train.v2.api.train_fn_utils import get_context, report  # type: ignore[import-untyped]


def train_func() -> None:
    report({"name": get_context().get_experiment_name()})


trainer = DataParallelTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(name="mnist/first", storage_path=os.path.abspath("results")),
)
result = trainer.fit()
assert result.path == os.path.abspath("results/mnist/first")
assert Result.from_path("results/mnist/first").metrics == {"name": "first"}
