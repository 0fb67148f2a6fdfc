"""Two workers with half of each batch compute the same results as one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from drawbar.torch import prepare_model
from drawbar.train import DataConfig, Result, get_context, get_dataset_shard

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

STRATEGIES: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "fsdp": None,
    "fsdp2": {"modules": [nn.Linear]},
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 1))


@pytest.mark.usefixtures("ray_cluster")
def test_prepare_model_strategies_match_one_process(fit: Callable[..., Result]) -> None:
    def train(model: nn.Module, rank: int, size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        batches = torch.randn(5, 8, 4, generator=generator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.eval()  # the statistics of half a batch differ from those of a complete one
        for batch in batches:
            x = batch[rank::size]
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
        output: torch.Tensor = model(batches[0])
        return output.detach()

    def joined_steps() -> int:
        """Train on parts that are not equally long, with what PyTorch has for that."""
        shard: Any = get_dataset_shard("train")
        model: Any = prepare_model(nn.Linear(1, 1))
        with Join([model]):
            for batch in shard.iter_torch_batches(batch_size=1):
                model(batch["x"][:, None].float()).sum().backward()
        return len(shard)

    def function() -> tuple[list[torch.Tensor], int]:
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
        return outputs, joined_steps()

    torch.manual_seed(0)
    alone = train(network(), 0, 1)
    result = fit(
        function,
        num_workers=2,
        datasets={"train": pa.table({"x": [1.0] * 5})},
        dataset_config=DataConfig(uneven_rows="keep"),
    )
    assert [steps for _, steps in result.return_values] == [2, 3]
    for outputs, _ in result.return_values:
        for output in outputs:
            torch.testing.assert_close(output, alone, rtol=0, atol=1e-5)
