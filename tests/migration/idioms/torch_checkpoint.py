"""A model as a checkpoint."""

import torch

from drawbar import train
from drawbar.train import ScalingConfig
from drawbar.train.torch import TorchCheckpoint, TorchTrainer


def train_func() -> None:
    model = torch.nn.Linear(1, 1)
    train.report({}, checkpoint=TorchCheckpoint.from_state_dict(model.state_dict()))


result = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=0)).fit()
assert result.checkpoint
loaded = TorchCheckpoint(result.checkpoint.path).get_model(torch.nn.Linear(1, 1))
assert isinstance(loaded, torch.nn.Linear)
