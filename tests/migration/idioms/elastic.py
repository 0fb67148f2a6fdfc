"""Between two numbers of workers."""

from drawbar.train import (
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    get_context,
    get_preemption_info,
)


def train_func() -> int:
    assert get_preemption_info() is None
    return get_context().get_world_size()


result = DataParallelTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=(1, 2)),
    run_config=RunConfig(failure_config=FailureConfig(max_failures=-1)),
).fit()
assert result.return_value in (1, 2)
