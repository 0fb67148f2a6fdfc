"""prepare_model on one worker, and what it refuses."""

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
def test_one_worker_gets_its_own_model_back(fit: Callable[..., Result], strategy: Any) -> None:
    def function() -> bool:
        model = nn.Linear(1, 1)
        return prepare_model(model, parallel_strategy=strategy) is model

    assert fit(function).return_value


def test_the_model_is_moved_to_the_device_that_is_named(fit: Callable[..., Result]) -> None:
    def function() -> str:
        model = prepare_model(nn.Linear(1, 1), move_to_device=torch.device("meta"))
        return next(model.parameters()).device.type

    assert fit(function).return_value == "meta"


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, found 3 \(int\)"):
        prepare_model(3)  # type: ignore[arg-type]


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one of 'ddp', 'fsdp', 'fsdp2' or None, found 'dpp'"):
        prepare_model(nn.Linear(1, 1), parallel_strategy="dpp")  # type: ignore[arg-type]


def test_without_a_process_group_the_trainer_is_named() -> None:
    def function() -> None:
        with pytest.raises(
            RuntimeError, match=r"needs the process group .* drawbar.torch.TorchTrainer"
        ):
            prepare_model(nn.Linear(1, 1))

    run_in_threads(function, num_workers=2)


def test_arguments_without_a_strategy_are_refused() -> None:
    with pytest.raises(ValueError, match="has 'mesh', but parallel_strategy is None"):
        prepare_model(
            nn.Linear(1, 1), parallel_strategy=None, parallel_strategy_kwargs={"mesh": None}
        )


def test_a_function_that_names_a_backend_of_torch_can_be_sent(fit: Callable[..., Result]) -> None:
    def function() -> bool:
        return torch.backends.cudnn.deterministic

    assert fit(function).return_value is False
