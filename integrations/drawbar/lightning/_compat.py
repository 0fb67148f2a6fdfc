"""Private APIs of Lightning and DeepSpeed; read in Lightning 2.4 to 2.6 and DeepSpeed 0.16 to 0.19.

No other file of this package uses them.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any, cast

from torch import nn


class LauncherHook:
    """Base class of strategies that choose their launcher when a Trainer is created.

    Lightning has no argument for a launcher. Place it before Lightning's strategy.
    """

    _launcher: Any

    def configure_launcher(self) -> None:
        """Call `set_launcher`, or do nothing."""

    def _configure_launcher(self) -> None:
        self.configure_launcher()

    def set_launcher(self, launcher: object) -> None:
        """Set the launcher; None for no launcher."""
        self._launcher = launcher


class ModelSetupHook:
    """Base class of a `DDPStrategy` or `FSDPStrategy` that wraps the model itself.

    Lightning's public `setup` does all its other work, too. Place it before Lightning's strategy.
    """

    def wrap_model(self, model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Wrap a model with Lightning's function `wrap`."""
        return wrap(model)

    def _setup_model(self, model: nn.Module) -> Any:
        return self.wrap_model(model, super()._setup_model)  # type: ignore[misc]  # Lightning's


def get_mesh_shape(strategy: object) -> tuple[int | str, int | str]:
    """Return the data-parallel and tensor-parallel size that a `ModelParallelStrategy` has.

    Its device mesh does not exist yet.
    """
    untyped: Any = strategy
    return untyped._data_parallel_size, untyped._tensor_parallel_size


def set_mesh_shape(strategy: object, shape: tuple[int, int]) -> None:
    """Set the sizes of `get_mesh_shape`, from which Lightning creates its device mesh."""
    untyped: Any = strategy
    untyped._data_parallel_size, untyped._tensor_parallel_size = shape


def get_cluster_environment(trainer: object) -> object:
    """Return the cluster environment that the user passed to the Trainer, or None.

    `Trainer.strategy.cluster_environment` may also be Lightning's choice.
    """
    environment: object = cast("Any", trainer)._accelerator_connector._cluster_environment_flag
    return environment


def make_precision_plugin(trainer: object) -> Any:
    """Create the precision plugin for the Trainer's arguments and this process's devices."""
    return cast("Any", trainer)._accelerator_connector._check_and_init_precision()


def get_trainer(module: object) -> Any:
    """Return the Trainer of a module, or None. `module.trainer` raises if there is none."""
    return None if module is None else cast("Any", module)._trainer


def stops_before_training(callback: object) -> bool:
    """Return whether a callback belongs to Lightning's `Tuner` and ends `fit` before training.

    False if Lightning's callbacks do not have the attribute.
    """
    return bool(getattr(callback, "_early_exit", False))


def mark_step_as_saved(model_checkpoint: object, step: int) -> None:
    """Record in a `ModelCheckpoint` that it has saved a step, which `state_dict()` omits."""
    cast("Any", model_checkpoint)._last_global_step_saved = step


def get_train_loaders(trainer: object) -> tuple[list[Any], str]:
    """Return the loaders that `fit` reads together, and the mode of their `CombinedLoader`."""
    combined = cast("Any", trainer).fit_loop._combined_loader
    return ([], "") if combined is None else (combined.flattened, combined._mode)


def is_creating_train_loaders(trainer: object) -> bool:
    """Return whether `fit` creates its training loaders now, and not its validation loaders."""
    fit_loop = cast("Any", trainer).fit_loop
    return fit_loop._combined_loader is None or fit_loop._should_reload_train_dl


def is_prefetching(trainer: object) -> bool:
    """Return whether `fit` reads training batches one ahead, because their number is unknown.

    False if Lightning's fetcher of batches does not have the attributes.
    """
    fetcher = getattr(cast("Any", trainer).fit_loop, "_data_fetcher", None)
    return hasattr(fetcher, "batches") and getattr(fetcher, "length", 0) is None


def has_prefetched_batch(trainer: object) -> bool:
    """Return whether `fit` has read a training batch that it has not passed to the module."""
    fetcher = getattr(cast("Any", trainer).fit_loop, "_data_fetcher", None)
    return bool(getattr(fetcher, "batches", None))


def get_reload_epochs(trainer: object) -> tuple[float, float]:
    """Return the epochs in which the training and validation loaders were created.

    Minus infinity if they were not.
    """
    fit_loop = cast("Any", trainer).fit_loop
    return (
        fit_loop._last_train_dl_reload_epoch,
        fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch,
    )


def set_train_reload_epoch(trainer: object, epoch: float) -> None:
    """Set the epoch from which Lightning counts until it creates the training loaders again."""
    cast("Any", trainer).fit_loop._last_train_dl_reload_epoch = epoch


def set_val_reload_epoch(trainer: object, epoch: float) -> None:
    """Set the epoch from which Lightning counts until it creates the validation loaders again."""
    cast("Any", trainer).fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = epoch


def undo_step_count(trainer: object) -> None:
    """Subtract one from the step number of loggers, which Lightning adds when it resumes.

    Lightning adds it if an optimizer step ends at the batch count, even if the checkpoint was saved
    after later batches.
    """
    cast("Any", trainer).fit_loop.epoch_loop._batches_that_stepped -= 1


def begin_next_epoch(trainer: object) -> None:
    """Let Lightning begin the next epoch after a checkpoint of the end of an epoch.

    Otherwise, it continues the count of the epoch that is complete, and a checkpoint at the end of
    the next epoch would resume at the beginning of that epoch. With `max_steps`, it even trains a
    further batch in the complete epoch.
    """
    fit_loop = cast("Any", trainer).fit_loop
    progress = fit_loop.epoch_progress.current
    if not hasattr(fit_loop, "restarted_mid_epoch") or progress.ready != progress.processed:
        return  # Lightning before 2.5, or an epoch that is not complete
    if fit_loop.restarted_mid_epoch:
        fit_loop.reset_restart_stage()
    elif fit_loop.restarted_on_epoch_end:
        fit_loop.epoch_progress.increment_completed()
        end_restart(trainer)
        fit_loop.epoch_loop.restarting = False
        fit_loop.reset_restart_stage()
        fit_loop.epoch_loop.reset_restart_stage()


def end_restart(trainer: object) -> None:
    """Let Lightning step `ReduceLROnPlateau` at the end of an epoch that was resumed in its middle.

    Lightning does not, because its checkpoints do not contain the monitored metric.
    """
    cast("Any", trainer).fit_loop._restarting = False


def has_weights_only_argument(load_checkpoint: Callable[..., object]) -> bool:
    """Return whether a strategy's `load_checkpoint` has `weights_only`, as of Lightning 2.6.

    Older versions unpickle checkpoints in full.
    """
    return "weights_only" in inspect.signature(load_checkpoint).parameters


def get_process_group_settings(strategy: object) -> tuple[str | None, timedelta | None]:
    """Return the backend and the timeout that the user passed to a strategy.

    None for settings that the strategy does not have. `process_group_backend` may also be
    Lightning's choice.
    """
    return getattr(strategy, "_process_group_backend", None), getattr(strategy, "_timeout", None)


def has_full_state_dict(fsdp_strategy: object) -> bool:
    """Return whether an `FSDPStrategy` has `state_dict_type="full"`."""
    return bool(cast("Any", fsdp_strategy)._state_dict_type == "full")


def get_ddp_arguments(strategy: object) -> dict[str, Any]:
    """Return the arguments of `DistributedDataParallel` that the user passed to a strategy."""
    return dict(cast("Any", strategy)._ddp_kwargs)


def averages_models(strategy: object) -> bool:
    """Return whether a `DDPStrategy` averages the models of the ranks after some steps."""
    return cast("Any", strategy)._model_averaging_period is not None


def validates_by_time(trainer: object) -> bool:
    """Return whether `val_check_interval` is a time, as of Lightning 2.6."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def reads_batches_in_module(trainer: object) -> bool:
    """Return whether `training_step` receives an iterator of batches as `dataloader_iter`."""
    fetcher = cast("Any", trainer).fit_loop._data_fetcher
    return type(fetcher).__name__ == "_DataLoaderIterDataFetcher"


_SAVING_STATE = (
    *("_last_global_step_saved", "_last_checkpoint_saved"),
    "_defer_save_until_validation",  # as of Lightning 2.6
)


def read_saving_state(callback: object) -> dict[str, Any]:
    """Return what `state_dict()` of a `ModelCheckpoint` omits; nothing for other callbacks.

    The next step at which it saves depends on it. Set the values as attributes.
    """
    return {name: vars(callback)[name] for name in _SAVING_STATE if name in vars(callback)}


_BATCH_HOOKS = ("advance", "on_advance_end", "_broadcast_sigterm_tensor")


def hook_batches(
    trainer: object, before_batch: Callable[[], bool], before_other_code: Callable[[], None]
) -> None:
    """Call functions between the batches of `fit`, where Lightning has no hooks.

    Lightning then sends no SIGTERM of rank 0 to the others, which it does before each batch in the
    default process group.

    Args:
        trainer: The Trainer.
        before_batch: Called before a batch is read. If it returns True, Lightning continues as it
            does after a batch.
        before_other_code: Called after a batch if a validation or the end of the epoch follows.
    """
    loop = cast("Any", trainer).fit_loop.epoch_loop
    advance, on_advance_end = loop.advance, loop.on_advance_end

    def advance_unless_loaded(fetcher: Any) -> None:
        # After a restart, Lightning may call `advance` only to repeat a validation.
        skips_batch = loop.restarting and loop._should_check_val_fx(fetcher)
        if skips_batch or not before_batch():
            advance(fetcher)

    def end_batch(fetcher: Any) -> None:
        is_done = loop._is_training_done or loop.trainer.should_stop
        if is_done or loop._should_check_val_fx(fetcher):
            before_other_code()
        on_advance_end(fetcher)

    vars(loop).update(
        zip(_BATCH_HOOKS, (advance_unless_loaded, end_batch, lambda: None), strict=True)
    )


def unhook_batches(trainer: object) -> None:
    """Undo `hook_batches`."""
    for name in _BATCH_HOOKS:
        vars(cast("Any", trainer).fit_loop.epoch_loop).pop(name, None)


def create_validation_loaders(trainer: Any) -> None:
    """Create the validation loaders of `fit`, if they do not exist yet."""
    if trainer.enable_validation and trainer.val_dataloaders is None:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True


_METRIC_COUNTERS = ("_update_count", "_computed")


def read_metric_states(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return copies of the states of torchmetrics, by name."""
    return {
        name: {
            state: value.copy() if isinstance(value, list) else value.clone()
            for state, value in metric.metric_state.items()
        }
        | {counter: vars(metric)[counter] for counter in _METRIC_COUNTERS}
        for name, metric in metrics.items()
    }


def load_metric_states(metrics: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Load the result of `read_metric_states` of another rank."""
    for name, metric in metrics.items():
        for state, value in states[name].items():
            setattr(metric, state, value)


def find_metrics(module: nn.Module) -> dict[str, Any]:
    """Return the torchmetrics of a module, by their names in the module."""
    from torchmetrics import Metric

    return {name: each for name, each in module.named_modules() if isinstance(each, Metric)}


_METRICS = ("_logged_metrics", "_callback_metrics", "_progress_bar_metrics")
_LOG_STATE = ("_first_loop_iter", "_current_fx")
_RESULT_STATE = (
    *("value", "cumulated_batch_size", "has_reset"),
    *("_forward_cache", "_computed", "_update_count"),
)


def read_result(result: Any) -> tuple[object, bool, dict[str, Any]]:
    """Return a value of `self.log`. Lightning replaces its tensors and does not change them."""
    metadata = copy.copy(result.meta)
    metadata.sync = dataclasses.replace(metadata.sync, fn=None)  # a method of the strategy
    values = {name: vars(result)[name] for name in _RESULT_STATE if name in vars(result)}
    if not result.is_tensor:
        del values["value"]  # torchmetrics of the module
    return metadata, result.is_tensor, values


def make_result(trainer: Any, metadata: Any, is_tensor: bool, values: Mapping[str, Any]) -> object:
    """Make a value of `self.log` from the result of `read_result`."""
    module = sys.modules[type(metadata).__module__]
    metadata.sync = dataclasses.replace(metadata.sync, fn=trainer.strategy.reduce)
    result = cast("Any", module)._ResultMetric(metadata, is_tensor)
    vars(result).update(values)
    if not is_tensor:
        result.value = trainer.lightning_module.get_submodule(metadata.metric_attribute)
    return cast("object", result)


def read_fit_state(trainer: Any) -> dict[str, Any]:
    """Return the progress of `fit`, and its logged metrics. Later batches do not change it."""
    fit_loop, connector = trainer.fit_loop, trainer._logger_connector
    return {
        "progress": {
            name: value
            for name, value in fit_loop.state_dict().items()
            if not name.endswith("state_dict")
        },
        "logged_steps": fit_loop.epoch_loop._batches_that_stepped,
        "metrics": {name: dict(getattr(connector, name)) for name in _METRICS},
        "log_state": {name: getattr(connector, name) for name in _LOG_STATE},
        "results": {
            name: read_result(result) for name, result in fit_loop.epoch_loop._results.items()
        },
    }


def load_fit_state(trainer: Any, state: Mapping[str, Any]) -> None:
    """Load the result of `read_fit_state` of another rank."""
    fit_loop, connector = trainer.fit_loop, trainer._logger_connector
    for name, progress in state["progress"].items():
        attrgetter(name)(fit_loop).load_state_dict(progress)
    fit_loop.epoch_loop._batches_that_stepped = state["logged_steps"]
    vars(connector).update(state["metrics"] | state["log_state"])
    results = fit_loop.epoch_loop._results
    results.clear()
    for name, (metadata, is_tensor, values) in state["results"].items():
        results[name] = make_result(trainer, metadata, is_tensor, values)


def restart_train_loaders(trainer: object) -> None:
    """Begin the running iteration of the training loaders again, at the progress of `fit`."""
    fit_loop = cast("Any", trainer).fit_loop
    fetcher = fit_loop._data_fetcher
    iter(fetcher)
    fetcher.fetched = fit_loop.epoch_loop.batch_progress.current.ready


@contextmanager
def load_universal_checkpoints(deepspeed_engine: object) -> Iterator[None]:
    """Make an engine load universal checkpoints in the `with` block.

    Otherwise, this is set in DeepSpeed's configuration at the start, for all checkpoints.
    """
    config = cast("Any", deepspeed_engine)._config
    config.load_universal_checkpoint = True
    try:
        yield
    finally:
        config.load_universal_checkpoint = False


def reset_deepspeed_state() -> None:
    """Reset the state that DeepSpeed keeps in its modules. It has no public function for this.

    It consists of process groups and of ZeRO 3 counters. Workers that are reused and workers that
    are new must have the same counters in the next attempt.
    """
    import deepspeed.comm.comm
    import deepspeed.utils.groups

    deepspeed.comm.comm.cdb = None
    importlib.reload(deepspeed.utils.groups)
    deepspeed.zero.Init.param_id = 0
    get_deepspeed_module_count()[0] = 0


def get_deepspeed_module_count() -> list[int]:
    """Return the list in which DeepSpeed counts modules: a default argument.

    Raises:
        RuntimeError: This version of DeepSpeed does not have the argument.
    """
    import deepspeed
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    defaults: Any = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    if not defaults or not isinstance(defaults[0], list):
        raise RuntimeError(
            f"Drawbar cannot reset the state of DeepSpeed {deepspeed.__version__} for the next "
            "attempt. Install deepspeed<=0.19."
        )
    count: list[int] = defaults[0]
    return count
