"""Tests of prepare_model on one worker, and of its errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drawbar.torch import prepare_model
from drawbar.train import Result
from drawbar.train.testing import run_in_threads


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2", None])
def test_prepare_model_on_one_worker_returns_same_model(
    fit: Callable[..., Result], strategy: Any
) -> None:
    def function() -> bool:
        model = nn.Linear(1, 1)
        return prepare_model(model, parallel_strategy=strategy) is model

    assert fit(function).return_value


def test_prepare_model_moves_model_to_given_device(fit: Callable[..., Result]) -> None:
    def function() -> str:
        model = prepare_model(nn.Linear(1, 1), move_to_device=torch.device("meta"))
        return next(model.parameters()).device.type

    assert fit(function).return_value == "meta"


def test_prepare_model_of_other_type_raises() -> None:
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module, found 3 \(int\)"):
        prepare_model(3)  # type: ignore[arg-type]


def test_prepare_model_with_unknown_strategy_raises() -> None:
    with pytest.raises(ValueError, match=r"one of 'ddp', 'fsdp', 'fsdp2' or None, found 'dpp'"):
        prepare_model(nn.Linear(1, 1), parallel_strategy="dpp")  # type: ignore[arg-type]


def test_prepare_model_without_process_group_names_trainer() -> None:
    def function() -> None:
        with pytest.raises(
            RuntimeError, match=r"needs an initialized process group.* drawbar.torch.TorchTrainer"
        ):
            prepare_model(nn.Linear(1, 1))

    run_in_threads(function, num_workers=2)


def test_prepare_model_arguments_without_strategy_raises() -> None:
    with pytest.raises(ValueError, match="has 'mesh', but parallel_strategy is None"):
        prepare_model(
            nn.Linear(1, 1), parallel_strategy=None, parallel_strategy_kwargs={"mesh": None}
        )


def test_pickle_of_function_with_torch_backends_succeeds(fit: Callable[..., Result]) -> None:
    def function() -> bool:
        return torch.backends.cudnn.deterministic

    assert fit(function).return_value is False
