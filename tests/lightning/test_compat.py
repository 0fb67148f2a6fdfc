"""Private APIs of Lightning and DeepSpeed: each test fails when one of them changes.

`test_errors.py` and the integration tests of this directory use the rest.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import deepspeed
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.plugins.environments import (  # type: ignore[attr-defined]  # public
    LightningEnvironment,
)
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from drawbar.lightning import _compat


@pytest.fixture
def trainer() -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )


def test_cluster_environment_is_the_one_of_the_user(trainer: L.Trainer) -> None:
    assert _compat.get_cluster_environment(trainer) is None
    environment = LightningEnvironment()
    options: Any = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    with_environment = L.Trainer(plugins=[environment], **options)
    assert _compat.get_cluster_environment(with_environment) is environment


def test_precision_plugin_is_made_anew(trainer: L.Trainer) -> None:
    plugin = _compat.make_precision_plugin(trainer)
    assert type(plugin) is type(trainer.precision_plugin)


def test_module_has_trainer_or_none(trainer: L.Trainer) -> None:
    module = L.LightningModule()
    assert _compat.get_trainer(module) is None
    module.trainer = trainer
    assert _compat.get_trainer(module) is trainer


def test_end_restart_sets_attribute_of_fit_loop(trainer: L.Trainer) -> None:
    trainer.fit_loop.restarting = True
    _compat.end_restart(trainer)
    assert not trainer.fit_loop.restarting


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's
def test_trainer_has_loaders_and_epochs_of_their_creation(trainer: L.Trainer) -> None:
    assert _compat.get_train_loaders(trainer) == ([], "")
    combined = CombinedLoader([[1], [2, 3]], "max_size")
    vars(trainer.fit_loop)["_combined_loader"] = combined
    assert _compat.get_train_loaders(trainer) == ([[1], [2, 3]], "max_size")
    assert _compat.get_reload_epochs(trainer) == (float("-inf"), float("-inf"))
    _compat.set_train_reload_epoch(trainer, 2)
    _compat.set_val_reload_epoch(trainer, 3)
    assert _compat.get_reload_epochs(trainer) == (2, 3)


def test_step_count_of_loggers_is_a_number_of_the_epoch_loop(trainer: L.Trainer) -> None:
    assert trainer.fit_loop.epoch_loop.on_save_checkpoint() == {"_batches_that_stepped": 0}
    _compat.undo_step_count(trainer)
    assert trainer.fit_loop.epoch_loop.on_save_checkpoint() == {"_batches_that_stepped": -1}


def test_ddp_strategy_has_arguments_and_sets_up_model() -> None:
    strategy = DDPStrategy(find_unused_parameters=True)
    assert _compat.get_ddp_arguments(strategy) == {"find_unused_parameters": True}
    assert not _compat.averages_models(strategy)
    assert _compat.averages_models(DDPStrategy(model_averaging_period=2))
    assert "self._setup_model(" in inspect.getsource(DDPStrategy.configure_ddp)


def test_trainer_has_time_between_validations() -> None:
    options: Any = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    assert not _compat.validates_by_time(L.Trainer(val_check_interval=1.0, **options))
    assert _compat.validates_by_time(L.Trainer(val_check_interval="00:00:00:01", **options))


class Quadratic(L.LightningModule):
    """Module that logs its parameter and torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.metric = MeanMetric()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.weight * batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.metric(loss)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_quadratic(before_batch: Callable[[L.Trainer, Quadratic], None]) -> tuple[L.Trainer, int]:
    """Train for four steps. Return the Trainer, and how often other code has followed a batch."""
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1)
    module, ends = Quadratic(), []

    def hook() -> bool:
        before_batch(trainer, module)
        return False

    _compat.hook_batches(trainer, hook, lambda: ends.append(trainer.global_step))
    trainer.fit(module, DataLoader(torch.ones(4, 1)))  # type: ignore[arg-type]  # a tensor has rows
    _compat.unhook_batches(trainer)
    return trainer, len(ends)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*tensorboardX")
def test_fit_continues_with_state_of_another_trainer() -> None:
    states = []

    def read(trainer: L.Trainer, module: Quadratic) -> None:
        metrics = _compat.read_metric_states(_compat.find_metrics(module))
        weights = copy.deepcopy(module.state_dict())
        states.append((_compat.read_fit_state(trainer), metrics, weights))

    complete, num_ends = fit_quadratic(read)
    assert num_ends == 1

    def load(trainer: L.Trainer, module: Quadratic) -> None:
        if trainer.global_step == 0:
            state, metrics, weights = states[2]
            _compat.load_fit_state(trainer, state)
            _compat.load_metric_states(_compat.find_metrics(module), metrics)
            module.load_state_dict(weights)
            _compat.restart_train_loaders(trainer)

    resumed, num_ends = fit_quadratic(load)
    assert num_ends == 1
    assert resumed.global_step == complete.global_step == 4
    expected = {name: value.item() for name, value in complete.callback_metrics.items()}
    assert expected.keys() == {"loss", "loss_step", "loss_epoch", "metric"}
    metrics = {name: value.item() for name, value in resumed.callback_metrics.items()}
    assert metrics == pytest.approx(expected)


def test_callbacks_of_tuner_stop_before_training() -> None:
    assert not _compat.stops_before_training(ModelCheckpoint())
    for kind in (BatchSizeFinder, LearningRateFinder):
        assert "self._early_exit" in inspect.getsource(kind)


def test_model_checkpoint_has_last_saved_step() -> None:
    callback = ModelCheckpoint()
    assert "_last_global_step_saved" in vars(callback)
    _compat.mark_step_as_saved(callback, 3)
    assert vars(callback)["_last_global_step_saved"] == 3


def test_model_checkpoint_has_saving_state() -> None:
    state = _compat.read_saving_state(ModelCheckpoint())
    names = {"_last_global_step_saved", "_last_checkpoint_saved"}
    assert names <= state.keys() <= names | {"_defer_save_until_validation"}
    assert _compat.read_saving_state(EarlyStopping("loss")) == {}
    if hasattr(ModelCheckpoint, "on_train_end"):
        assert "not self._last_checkpoint_saved" in inspect.getsource(ModelCheckpoint.on_train_end)


@pytest.mark.parametrize("kind", [DDPStrategy, FSDPStrategy, ModelParallelStrategy])
def test_process_group_settings_are_those_of_the_user(kind: Any) -> None:
    options: Any = {"process_group_backend": "gloo", "timeout": timedelta(seconds=9)}
    settings = _compat.get_process_group_settings(kind(**options))
    assert settings == ("gloo", timedelta(seconds=9))


def test_fsdp_strategy_has_state_dict_type_and_model_setup() -> None:
    assert _compat.has_full_state_dict(FSDPStrategy(state_dict_type="full"))
    assert not _compat.has_full_state_dict(FSDPStrategy(state_dict_type="sharded"))
    assert "self._setup_model(" in inspect.getsource(FSDPStrategy.setup)


def test_model_parallel_strategy_has_mesh_shape() -> None:
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size="auto")
    assert _compat.get_mesh_shape(strategy) == (1, "auto")
    _compat.set_mesh_shape(strategy, (1, 2))
    assert _compat.get_mesh_shape(strategy) == (1, 2)


def test_strategies_have_launcher() -> None:
    assert "return self._launcher" in inspect.getsource(Strategy)
    assert "_configure_launcher" in vars(DDPStrategy)


def test_deepspeed_counts_modules_in_default_argument() -> None:
    count = _compat.get_deepspeed_module_count()
    count[0] = 5
    deepspeed.zero.Init.param_id = 5
    _compat.reset_deepspeed_state()
    assert (count[0], deepspeed.zero.Init.param_id) == (0, 0)


def test_deepspeed_engine_has_config() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    assert "self._config" in inspect.getsource(DeepSpeedEngine)
    assert "self.load_universal_checkpoint" in inspect.getsource(DeepSpeedConfig)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, in Lightning
def test_trainer_has_fetcher_with_prefetched_batches() -> None:
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher

    trainer = L.Trainer(logger=False, enable_progress_bar=False)
    assert not _compat.is_prefetching(trainer)
    assert not _compat.has_prefetched_batch(trainer)
    fetcher: Any = _PrefetchDataFetcher()
    fetcher.setup(CombinedLoader(x for x in range(2)))
    vars(trainer.fit_loop)["_data_fetcher"] = fetcher
    iter(fetcher)
    assert _compat.is_prefetching(trainer)
    assert _compat.has_prefetched_batch(trainer)
