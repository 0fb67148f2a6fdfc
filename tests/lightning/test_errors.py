"""Errors for wrong use name the replacement."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
from lightning.fabric.plugins import ClusterEnvironment

from drawbar.lightning import (
    RayDDPStrategy,
    RayFSDPStrategy,
    RayLightningEnvironment,
    RayStrategy,
    prepare_trainer,
)
from drawbar.torch import TorchConfig, TorchTrainer
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig

HERE = ScalingConfig(num_workers=0)  # the training function runs in this process
QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


@pytest.mark.parametrize("strategy", ["ddp", "auto"])
def test_prepare_trainer_with_lightning_strategy_raises(
    run_config: RunConfig, strategy: str
) -> None:
    def function() -> None:
        prepare_trainer(L.Trainer(strategy=strategy, devices=1, **QUIET))

    message = r"Use Trainer\(strategy=drawbar.lightning.RayDDPStrategy\(\)\)"
    with pytest.raises(Exception, match=message):
        TorchTrainer(function, scaling_config=HERE, run_config=run_config).fit()


def test_prepare_trainer_with_other_cluster_environment_raises(run_config: RunConfig) -> None:
    def function() -> None:
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        strategy: Any = RayDDPStrategy()
        plugins: Any = [SLURMEnvironment(auto_requeue=False)]
        prepare_trainer(L.Trainer(strategy=strategy, plugins=plugins, **QUIET))

    message = r"SLURMEnvironment cannot be used.* plugins=\[RayLightningEnvironment\(\)\]"
    with pytest.raises(Exception, match=message):
        TorchTrainer(function, scaling_config=HERE, run_config=run_config).fit()


def test_strategy_in_driver_without_num_workers_raises() -> None:
    strategy: Any = RayDDPStrategy()
    with pytest.raises(RuntimeError, match=r"Use RayDDPStrategy\(num_workers=2\), or create the"):
        L.Trainer(strategy=strategy, **QUIET)


def test_strategy_in_worker_with_num_workers_raises(run_config: RunConfig) -> None:
    def function() -> None:
        strategy: Any = RayFSDPStrategy(num_workers=2)
        L.Trainer(strategy=strategy, **QUIET)

    with pytest.raises(Exception, match=r"Use RayFSDPStrategy\(\) here and TorchTrainer\("):
        TorchTrainer(function, scaling_config=HERE, run_config=run_config).fit()


def test_strategy_without_process_group_raises(run_config: RunConfig) -> None:
    def function() -> None:
        strategy: Any = RayDDPStrategy()
        L.Trainer(strategy=strategy, **QUIET)

    with pytest.raises(Exception, match="the training function with drawbar"):
        DataParallelTrainer(function, scaling_config=HERE, run_config=run_config).fit()


def test_strategy_with_other_process_group_options_raises(run_config: RunConfig) -> None:
    def function() -> None:
        strategy: Any = RayDDPStrategy(process_group_backend="nccl")
        L.Trainer(strategy=strategy, **QUIET)

    message = r"TorchTrainer\(torch_config=TorchConfig\(backend='nccl'\)\)"
    with pytest.raises(Exception, match=message):
        TorchTrainer(function, scaling_config=HERE, run_config=run_config).fit()


def test_nccl_with_shared_gpu_raises() -> None:
    scaling = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.5})
    strategy: Any = RayDDPStrategy(scaling_config=scaling)
    with pytest.raises(ValueError, match="does not support workers that share a GPU"):
        L.Trainer(strategy=strategy, logger=False).fit(L.LightningModule())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 2, "scaling_config": HERE}, "cannot be combined with scaling_config"),
        ({"scaling_config": HERE}, "Remove strategy= from"),
        ({"use_gpu": True}, "Set num_workers=N"),
        ({"num_workers": -1}, "num_workers"),
    ],
)
def test_strategy_with_conflicting_arguments_raises(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RayDDPStrategy(**arguments)


def test_environment_outside_training_function_raises() -> None:
    with pytest.raises(RuntimeError, match="inside a training function"):
        RayLightningEnvironment().world_size()


def python(code: str) -> str:
    """Run a script and return the last line of its stderr."""
    process = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    return process.stderr.strip().splitlines()[-1]


def test_missing_lightning_raises_with_install_command() -> None:
    hide = "import sys; sys.modules |= {'lightning': None, 'pytorch_lightning': None}; "
    error = python(hide + "from drawbar.lightning import RayDDPStrategy as S; S(num_workers=2)")
    assert re.search('run: pip install .*"pytorch-lightning[^"]*>=2.4', error)


@pytest.mark.nightly
def test_missing_deepspeed_raises_with_install_command() -> None:
    hide = "import sys; sys.modules['deepspeed'] = None; "
    error = python(hide + "from drawbar.lightning import RayDeepSpeedStrategy as S; S()")
    assert re.search('run: pip install .*"deepspeed>=0.16"', error)


BOTH_PACKAGES = """
import lightning as L, pytorch_lightning as pl
from drawbar.lightning import *

def error_of(make):
    try:
        make()
    except Exception as error:
        return str(error)

unselected = error_of(lambda: RayDDPStrategy(num_workers=2))
assert 'drawbar.lightning.set_lightning_package("lightning")' in unselected, unselected
set_lightning_package("pytorch_lightning")
other = error_of(lambda: L.Trainer(strategy=RayDDPStrategy()))
assert "<RayDDPStrategy for pytorch_lightning>" in other, other  # Lightning's words, our name
pl.Trainer(strategy=RayDDPStrategy(num_workers=2))
raise SystemExit("made")
"""


@pytest.mark.nightly
def test_set_lightning_package_resolves_ambiguity() -> None:
    assert python(BOTH_PACKAGES) == "made"


def test_late_bound_objects_are_instances_of_both_classes() -> None:
    class Mine(RayDDPStrategy):
        pass

    strategy = Mine(num_workers=2, process_group_backend="gloo")
    assert isinstance(strategy, RayStrategy)
    for each in (strategy, copy.copy(strategy)):
        assert isinstance(each, L.pytorch.strategies.DDPStrategy)
        assert each.process_group_backend == "gloo"
    environment = pickle.loads(pickle.dumps(RayLightningEnvironment()))
    assert isinstance(environment, ClusterEnvironment)


def test_process_group_options_are_passed_to_torch_config() -> None:
    strategy = RayDDPStrategy(
        num_workers=2, process_group_backend="gloo", timeout=timedelta(hours=1)
    )
    arguments = strategy.process_group_options()
    assert TorchConfig(**arguments) == TorchConfig(backend="gloo", timeout_s=3600)
