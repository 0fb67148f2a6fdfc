"""Seeds, devices, and the process group."""

import torch
import torch.distributed as dist

from drawbar.train import ScalingConfig
from drawbar.train.torch import TorchConfig, TorchTrainer, enable_reproducibility, get_device


def train_func() -> float:
    enable_reproducibility(seed=7)
    number = torch.rand(1, device=get_device())
    dist.all_reduce(number)
    return float(number)


result = TorchTrainer(
    train_func,
    torch_config=TorchConfig(backend="gloo", timeout_s=60),
    scaling_config=ScalingConfig(num_workers=2),
).fit()
assert len(set(result.return_values)) == 1
