"""Tests of TorchXLAConfig on a machine without an XLA device."""

from __future__ import annotations

import importlib.util

import pytest

from drawbar.torch import TorchConfig, TorchTrainer, TorchXLAConfig
from drawbar.train import ScalingConfig

without_xla = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is not None,
    reason="needs an environment without torch_xla",
)


def test_xla_config_has_backend_xla() -> None:
    config = TorchXLAConfig(timeout_s=60)
    assert isinstance(config, TorchConfig)
    assert config.resolve_backend(has_gpus=False) == "xla"
    assert not config.neuron_parallel_compile


@without_xla
def test_xla_config_without_torch_xla_names_package() -> None:
    trainer = TorchTrainer(
        print, torch_config=TorchXLAConfig(), scaling_config=ScalingConfig(num_workers=0)
    )
    with pytest.raises(ImportError, match=r"needs torch_xla.*pip install torch-neuronx"):
        trainer.fit()
