"""A small network on scikit-learn's digits, trained by Accelerate on Ray or under torchrun."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


class Digits:
    """What training functions use, also where there is no Drawbar."""

    @staticmethod
    def network(dropout: float = 0.0) -> Any:
        import torch
        from torch import nn

        torch.manual_seed(0)
        layers = nn.Linear(64, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 10)
        return nn.Sequential(*layers)

    @staticmethod
    def loader(batch_size: int = 16) -> Any:
        import torch
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        data = torch.utils.data.TensorDataset(
            torch.from_numpy(images[:640]).float() / 16, torch.from_numpy(labels[:640])
        )
        return torch.utils.data.DataLoader(data, batch_size, shuffle=True)

    @staticmethod
    def step(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> float:
        """Take a step; gives the loss over all processes."""
        import torch

        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(accelerator.reduce(loss.detach(), "mean"))


@pytest.fixture(scope="session")
def digits() -> type[Digits]:
    return Digits
