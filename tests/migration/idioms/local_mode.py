"""No workers: the function runs in this very process."""

import os

from drawbar.train import ScalingConfig
from drawbar.train.torch import TorchTrainer


def train_func() -> int:
    return os.getpid()


result = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=0)).fit()
assert result.return_value == os.getpid()
