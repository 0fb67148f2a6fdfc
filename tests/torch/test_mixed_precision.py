"""Tests of mixed precision: accelerate, prepare_model, prepare_optimizer, and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drawbar.torch import accelerate, backward, prepare_model, prepare_optimizer
from drawbar.train import Result


class Probe(nn.Module):
    """A linear layer that remembers in which precision it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        self.seen = y.dtype
        return {"y": y}


def plain_step() -> list[float]:
    """Result of the same step in full precision with plain PyTorch."""
    torch.manual_seed(0)
    model = Probe()
    model(torch.ones(4, 2))["y"].pow(2).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [float(w) for p in model.parameters() for w in p.detach().flatten()]


def step(amp: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    accelerate(amp)
    model: Any = prepare_model(Probe())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = prepare_optimizer(plain)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss = model(torch.ones(4, 2))["y"].pow(2).mean()
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()
    schedule.step()
    weights = [float(w) for p in model.parameters() for w in p.detach().flatten()]
    return model.seen, loss.dtype, optimizer is plain, optimizer.param_groups[0]["lr"], weights


@pytest.mark.parametrize(
    ("amp", "computed_in", "same_optimizer"),
    [
        (False, torch.float32, True),
        (True, torch.bfloat16, True),
        (torch.float16, torch.float16, False),
    ],
)
def test_accelerate_step_in_each_precision_matches_full_precision(
    fit: Callable[..., Result], amp: Any, computed_in: torch.dtype, same_optimizer: bool
) -> None:
    seen, loss, same, rate, weights = fit(lambda: step(amp)).return_value
    assert (seen, loss, same) == (computed_in, torch.float32, same_optimizer)
    assert rate == pytest.approx(0.01)
    assert weights == pytest.approx(plain_step(), abs=1e-6 if amp is False else 0.01)


def test_scaled_optimizer_skips_step_with_infinite_gradients(fit: Callable[..., Result]) -> None:
    def function() -> Any:
        accelerate(torch.float16)
        weight = nn.Parameter(torch.ones(1))
        optimizer = prepare_optimizer(torch.optim.SGD([weight], lr=1.0))
        for factor in (float("inf"), 1.0):
            optimizer.zero_grad()
            backward((weight * factor).sum())
            optimizer.step()
        return weight.tolist()

    assert fit(function).return_value == [0.0]


def test_scaled_optimizer_delegates_state(fit: Callable[..., Result]) -> None:
    def function() -> None:
        accelerate(torch.float16)
        plain = torch.optim.Adam([nn.Parameter(torch.ones(1))])
        optimizer = prepare_optimizer(plain)
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        assert optimizer.param_groups is plain.param_groups
        with pytest.raises(ValueError, match="does not work with gradient scaling"):
            optimizer.step(lambda: 0.0)

    fit(function)


def test_autocast_hooks_work_in_model_copy(fit: Callable[..., Result]) -> None:
    def function() -> bool:
        accelerate(True)
        model = prepare_model(Probe())
        twin = copy.deepcopy(model)
        nn.init.zeros_(twin.layer.weight)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(twin.layer.bias)  # type: ignore[union-attr, arg-type]
        return bool(twin(torch.ones(1, 2))["y"] == 0) and twin.seen == torch.bfloat16

    assert fit(function).return_value


def test_accelerate_called_twice_raises(fit: Callable[..., Result]) -> None:
    def function(first: Callable[[], Any]) -> None:
        first()
        with pytest.raises(RuntimeError, match="must be called once, before prepare_model"):
            accelerate()

    fit(lambda: function(accelerate))


def test_accelerate_after_prepare_model_raises(fit: Callable[..., Result]) -> None:
    def function() -> None:
        prepare_model(nn.Linear(1, 1))
        with pytest.raises(RuntimeError, match="before prepare_model"):
            accelerate(amp=True)

    fit(function)


def test_accelerate_with_other_dtype_raises(fit: Callable[..., Result]) -> None:
    def function() -> None:
        with pytest.raises(ValueError, match=r"found torch\.int8"):
            accelerate(torch.int8)

    fit(function)
