"""A rank of a data-parallel run that is slow is named with the slowest part of its steps."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar import train
from drawbar.torch import prepare_data_loader, prepare_model
from drawbar.train import Result, runs

STEPS = 60
SLOW_S = 0.05  # more than a step may be delayed on a busy machine


class Slow(nn.Module):
    """Layer that takes longer, as a rank on a slow device would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(3 * SLOW_S)
        return x


def train_func() -> None:
    is_slow = train.get_context().get_world_rank() == 1

    def collate(rows: list[Any]) -> torch.Tensor:
        if is_slow:
            time.sleep(SLOW_S)
        return torch.stack([row[0] for row in rows])

    dataset = TensorDataset(torch.ones(2 * STEPS, 4))
    loader: Any = prepare_data_loader(DataLoader(dataset, batch_size=1, collate_fn=collate))
    layers = [nn.Linear(4, 1)] + ([Slow()] if is_slow else [])
    model = prepare_model(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        train.step()
        with train.checkpoint_dir() as path:
            if is_slow:
                time.sleep(SLOW_S)
            (path / str(train.get_context().get_world_rank())).touch()
    train.report({})


@pytest.mark.usefixtures("ray_cluster")
def test_slow_rank_is_named_with_part(fit: Callable[..., Result]) -> None:
    result = fit(train_func, num_workers=2)
    record = runs.find_run(Path(result.path))
    found = [(straggler.rank, straggler.part) for straggler in record.stragglers]
    assert (1, "forward pass") in found
    split = record.read_rank_times()[-1].ranks[1].split_step()
    for part in ("data loader", "forward pass", "checkpoint"):
        assert split[part] >= SLOW_S
    command = [sys.executable, "-m", "drawbar.cli", "show", result.path, "--ranks", "--json"]
    shown = json.loads(subprocess.check_output(command))
    assert [row["rank"] for row in shown["ranks"]] == [0, 1]
    assert found == [(each["rank"], each["part"]) for each in shown["stragglers"]]
