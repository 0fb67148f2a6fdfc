"""The exception of a worker is found in the error of fit()."""

from drawbar.train import DataParallelTrainer, ScalingConfig, TrainingFailedError, WorkerGroupError


def train_func() -> None:
    raise ValueError("no such layer")


try:
    DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=1)).fit()
except TrainingFailedError as error:
    assert isinstance(error, WorkerGroupError)
    assert isinstance(error.worker_failures[0], ValueError)
else:
    raise AssertionError("fit() raised no TrainingFailedError")
