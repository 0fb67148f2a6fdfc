"""A callback receives reports and failures."""

from typing import Any

from drawbar import train
from drawbar.train import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig, UserCallback

received: list[Any] = []


class Logger(UserCallback):
    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        received.append(metrics[0]["loss"])

    def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
        received.append(str(worker_exceptions[0]))


def train_func() -> None:
    train.report({"loss": train.get_context().get_attempt()})
    if train.get_context().get_attempt() == 0:
        raise ValueError("once")


DataParallelTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=0),
    run_config=RunConfig(callbacks=[Logger()], failure_config=FailureConfig(max_failures=1)),
).fit()
assert received == [0, "once", 1]
