"""Small things are shared through the controller."""

import drawbar.train.collective
from drawbar import train
from drawbar.train import DataParallelTrainer, ScalingConfig


def train_func() -> str:
    rank = train.get_context().get_world_rank()
    address = train.collective.broadcast_from_rank_zero("address" if rank == 0 else "")
    drawbar.train.collective.barrier()
    return address


result = DataParallelTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit()
assert result.return_values == ["address", "address"]
