"""Tests of TorchConfig: arguments and requirements are checked before a process starts."""

from __future__ import annotations

from typing import Any

import pytest

from drawbar.torch import TorchConfig, TorchTrainer
from drawbar.train import ScalingConfig, ValidationConfig


def test_torch_config_has_argument_order_of_ray_train() -> None:
    config = TorchConfig("gloo", "tcp", 60)
    assert (config.backend, config.init_method, config.timeout_s) == ("gloo", "tcp", 60)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"init_method": "file"}, ValueError, "must be one of 'env', 'tcp', found 'file'"),
        ({"timeout_s": 0}, ValueError, "must be positive and finite, found 0"),
        ({"timeout_s": "30"}, TypeError, "must be seconds or a timedelta, found '30'"),
        ({"backend": 1}, TypeError, "must be a str or None, found 1"),
    ],
)
def test_torch_config_with_wrong_arguments_raises(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TorchConfig(**arguments)


def test_resolve_backend_depends_on_gpus() -> None:
    assert TorchConfig().resolve_backend(has_gpus=True) == "nccl"
    assert TorchConfig().resolve_backend(has_gpus=False) == "gloo"
    assert TorchConfig(backend="mpi").resolve_backend(has_gpus=True) == "mpi"


@pytest.mark.parametrize(("backend", "meant"), [("glo", "gloo"), ("cpu:glooo", "gloo")])
def test_torch_config_with_misspelled_backend_raises(backend: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"Did you mean '{meant}'"):
        TorchConfig(backend=backend).check_requirements(ScalingConfig(num_workers=2))


@pytest.mark.parametrize("backend", ["gloo", "ccl", "cpu:gloo,hpu:hccl", "xla", "smddp", "mpi"])
def test_torch_config_accepts_backends_of_other_packages(backend: str) -> None:
    TorchConfig(backend=backend).check_requirements(ScalingConfig(num_workers=2))


def test_torch_config_nccl_without_gpus_raises() -> None:
    with pytest.raises(ValueError, match=r"backend='nccl'\) needs GPUs, but the workers have none"):
        TorchConfig(backend="nccl").check_requirements(ScalingConfig(num_workers=2))


def test_torch_config_nccl_with_shared_gpu_raises() -> None:
    half = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.5})
    with pytest.raises(
        ValueError, match=r"workers that share a GPU.*\['GPU'\]=0.5.*backend='gloo'"
    ):
        TorchConfig().check_requirements(half)
    TorchConfig(backend="gloo").check_requirements(half)


def test_torch_trainer_with_other_torch_config_raises() -> None:
    with pytest.raises(TypeError, match="torch_config must be a TorchConfig, found 'gloo'"):
        TorchTrainer(print, torch_config="gloo")  # type: ignore[arg-type]


def test_torch_trainer_has_arguments_of_data_parallel_trainer() -> None:
    config = ValidationConfig(lambda checkpoint: {})
    assert TorchTrainer(lambda: None, validation_config=config).validation_config is config
