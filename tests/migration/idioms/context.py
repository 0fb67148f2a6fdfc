"""Ranks and sizes."""

from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig, get_context


def train_func() -> tuple[int, ...]:
    context = get_context()
    assert context.get_experiment_name() == "ranks"
    return (
        context.get_world_rank(),
        context.get_world_size(),
        context.get_local_rank(),
        context.get_local_world_size(),
        context.get_node_rank(),
    )


result = DataParallelTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
    run_config=RunConfig(name="ranks"),
).fit()
assert result.return_value == (0, 2, 0, 2, 0)
