"""The result of a run is had again from its directory."""

from drawbar import train
from drawbar.train import DataParallelTrainer, Result, RunConfig, ScalingConfig


def train_func() -> None:
    for step in range(3):
        train.report({"step": step})


trainer = DataParallelTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(name="restored"),
)
path = trainer.fit().path
result = Result.from_path(path)
assert result.metrics == {"step": 2}
assert list(result.metrics_dataframe["step"]) == [0, 1, 2]
assert result.error is None
