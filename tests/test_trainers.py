"""Each trainer lists its arguments explicitly (docs/decisions/0006-trainers-signatures.md)."""

from __future__ import annotations

import inspect

import pytest

from drawbar.jax import JaxTrainer
from drawbar.keras import KerasTrainer
from drawbar.lightgbm import LightGBMTrainer
from drawbar.tensorflow import TensorflowTrainer
from drawbar.torch import TorchTrainer
from drawbar.train import DataParallelTrainer
from drawbar.xgboost import XGBoostTrainer

TRAINERS = (
    JaxTrainer,
    KerasTrainer,
    LightGBMTrainer,
    TensorflowTrainer,
    TorchTrainer,
    XGBoostTrainer,
)


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda each: each.__name__)
def test_trainer_signature_has_common_arguments(trainer: type[DataParallelTrainer]) -> None:
    shared = dict(inspect.signature(DataParallelTrainer).parameters)
    del shared["train_loop_per_worker"], shared["backend_config"]  # it may be declared; its own
    taken = inspect.signature(trainer).parameters
    assert {name: str(taken[name].default) for name in shared if name in taken} == {
        name: str(each.default) for name, each in shared.items()
    }
