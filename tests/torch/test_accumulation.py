"""Tests of accumulation_steps: the loss curve does not depend on the number of workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar import train
from drawbar.torch import load_state, prepare_data_loader, prepare_model, save_async
from drawbar.train import Result, RunConfig
from drawbar.train.testing import run_in_threads

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

NUM_ROWS = 204  # the last step of an epoch has only 12 rows
GLOBAL_BATCH_SIZE = 48
BATCH_SIZE = 4


def make_loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_ROWS, 8, generator=generator)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    return prepare_data_loader(DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True))


def train_steps(num_steps: int) -> list[float]:
    """Train from the latest checkpoint, and return the mean loss of each optimizer step."""
    accumulation_steps = train.get_context().accumulation_steps(GLOBAL_BATCH_SIZE, BATCH_SIZE)
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if (state := load_state()) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    loader = make_loader()
    losses = list[float]()

    def update(loss_sum: float, num_samples: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= num_samples
        optimizer.step()
        optimizer.zero_grad()
        all_losses = train.collective.all_gather(loss_sum / num_samples)
        losses.append(sum(all_losses) / len(all_losses))
        if len(losses) == num_steps:  # within the loop, since `break` ends the epoch
            save_async({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    while True:
        loss_sum, num_samples = 0.0, 0
        for number, (x, y) in enumerate(loader, start=1):
            loss: Any = nn.functional.mse_loss(model(x), y, reduction="sum")
            loss.backward()
            loss_sum += loss.item()
            num_samples += len(x)
            if number % accumulation_steps == 0:
                update(loss_sum, num_samples)
                loss_sum, num_samples = 0.0, 0
                if len(losses) == num_steps:
                    break
        if num_samples:
            update(loss_sum, num_samples)
        if len(losses) == num_steps:
            return losses


def test_accumulation_steps_keep_loss_curve_with_other_numbers_of_workers(
    ray_cluster: None, fit: Callable[..., Result], run_config: RunConfig
) -> None:
    expected = fit(lambda: train_steps(8), run_config=replace(run_config, name="one")).return_value
    losses = []
    for num_workers, num_steps in ((2, 2), (3, 4), (2, 2)):
        losses += fit(partial(train_steps, num_steps), num_workers).return_value
    assert losses == pytest.approx(expected, rel=1e-5)


def test_accumulation_steps_divide_global_batch(run_config: RunConfig) -> None:
    def function() -> list[int]:
        context = train.get_context()
        return [context.accumulation_steps(48, batch_size) for batch_size in (1, 4, 16)]

    result = run_in_threads(function, num_workers=3, run_config=run_config)
    assert result.return_values == [[16, 4, 1]] * 3


def test_accumulation_steps_with_remainder_raises(run_config: RunConfig) -> None:
    def function() -> None:
        with pytest.raises(ValueError, match="to a multiple of 12, or change batch_size"):
            train.get_context().accumulation_steps(global_batch_size=32, batch_size=4)

    run_in_threads(function, num_workers=3, run_config=run_config)
