"""Small classification network, trained with Accelerate on Ray or under torchrun."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


class Digits:
    """Helpers for training functions, which also work without Drawbar."""

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

        random = torch.Generator().manual_seed(0)
        kinds, noise = (torch.rand(rows, 64, generator=random) for rows in (10, 640))
        labels = torch.arange(640) % 10
        data = torch.utils.data.TensorDataset((kinds.round()[labels] + noise) / 2, labels)
        return torch.utils.data.DataLoader(data, batch_size, shuffle=True)

    @staticmethod
    def step(accelerator: Any, model: Any, optimizer: Any, x: Any, y: Any) -> float:
        """Take a step and return the mean loss of all processes."""
        import torch

        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return float(accelerator.reduce(loss.detach(), "mean"))


@pytest.fixture(scope="session")
def digits() -> type[Digits]:
    return Digits


@pytest.fixture(scope="module", autouse=True)
def _keep_environment(keep_environment: None) -> None:
    """Use `keep_environment` in all modules: some of their tests run in this process."""


@pytest.fixture(scope="module", autouse=True)
def _reset_accelerate() -> None:
    """Forget the state that tests of other packages in this process have left in Accelerate."""
    from drawbar.torch._compat import get_accelerate_states

    for state in get_accelerate_states():
        state.clear()


@pytest.fixture(scope="module", autouse=True)
def _fork_workers(preload_transformers: None) -> None:
    """Use the fork server in all modules; `tests/train` starts workers without it."""
