"""Two workers on half of the batch each come to what one process comes to on all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drawbar.torch import prepare_model
from drawbar.train import Result, get_context

STRATEGIES: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "fsdp": None,
    "fsdp2": {"modules": [nn.Linear]},
}


@pytest.mark.usefixtures("ray_cluster")
def test_every_strategy_trains_as_one_process_does(fit: Callable[..., Result]) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 1))

    def train(model: nn.Module, rank: int, size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        batches = torch.randn(5, 8, 4, generator=generator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.eval()  # statistics of half a batch are not those of the whole
        for batch in batches:
            x = batch[rank::size]
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
        output: torch.Tensor = model(batches[0])
        return output.detach()

    def function() -> list[torch.Tensor]:
        rank = get_context().get_world_rank()
        outputs = []
        for strategy, kwargs in STRATEGIES.items():
            torch.manual_seed(rank)  # the ranks begin with different weights; rank 0's count
            model = prepare_model(
                network(),
                parallel_strategy=strategy,  # type: ignore[arg-type]
                parallel_strategy_kwargs=kwargs,
            )
            outputs.append(train(model, rank, 2))
        return outputs

    torch.manual_seed(0)
    alone = train(network(), 0, 1)
    for outputs in fit(function, num_workers=2).return_values:
        for output in outputs:
            torch.testing.assert_close(output, alone, rtol=0, atol=1e-5)
