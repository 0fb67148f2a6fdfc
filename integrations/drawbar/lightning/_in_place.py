"""In-place recovery of `Trainer.fit`: the surviving ranks stay in it when another rank dies.

A new process runs the training function from its start. When its `fit` is about to read the first
batch, it receives the state of another rank: weights, optimizers, schedulers, and random states,
and also the progress, metrics, and callbacks of the Trainer. It then continues at the place at
which the other rank has captured its state:

- before a batch,
- or after the last batch before a validation or the end of an epoch. The new process repeats the
  code that follows, with the recorded results of collectives, up to the line of the other ranks.

The second place is forgotten as soon as a rank is at the next batch.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from drawbar.lightning._compat import (
    averages_models,
    create_validation_loaders,
    find_metrics,
    get_ddp_arguments,
    hook_batches,
    load_fit_state,
    load_metric_states,
    read_fit_state,
    read_metric_states,
    read_saving_state,
    reads_batches_in_module,
    restart_train_loaders,
    unhook_batches,
    validates_by_time,
)
from drawbar.lightning._data_position import find_resumable_batches
from drawbar.lightning._epoch_start import warn_of_first_epoch
from drawbar.lightning._package import import_lightning_class
from drawbar.lightning._report_callback import RayTrainReportCallback
from drawbar.lightning._save_on_request import SaveOnRequest
from drawbar.torch.integration import CannotRecoverError, EpochPosition, InPlaceTraining
from drawbar.train import collective

_NEEDS = (
    "A rank of Lightning has it before a batch, in a validation, and at the end of an epoch, but "
    "not between an optimizer step and the end of its batch, and not if code after the batch, or "
    "before its backward pass, has changed weights"
)

_UNSUPPORTED_CALLBACKS = {
    "LearningRateFinder": "Search the learning rate in another run",
    "BatchSizeFinder": "Search the batch size in another run",
    "StochasticWeightAveraging": "Use the callback WeightAveraging",
}


class InPlaceFit:
    """In-place recovery of one call of `fit`.

    Args:
        trainer: Trainer of this rank.
        training: State of this rank's training.

    Raises:
        ValueError: A setting of the Trainer does not allow it.
    """

    def __init__(self, trainer: Any, training: InPlaceTraining) -> None:
        check_settings(trainer)
        self._metrics = find_metrics(trainer.lightning_module)
        for metric in self._metrics.values():
            if metric.dist_sync_fn is None:
                metric.dist_sync_fn = _gather
        training.needs = _NEEDS
        self._trainer = trainer
        self._training = training

    def wrap_model(self, model: Any) -> Any:
        """Make a model data-parallel."""
        return self._training.wrap_model(model, get_ddp_arguments(self._trainer.strategy))

    def add_optimizers(self) -> None:
        """Register the optimizers, so that this rank joins recoveries."""
        for optimizer in self._trainer.strategy.optimizers:
            self._training.add_optimizer(optimizer)

    def start(self) -> None:
        """Capture the state of this rank from now on, or receive it from another rank.

        Raises:
            ValueError: A training data loader cannot begin within an epoch.
        """
        check_loaders(self._trainer)
        # Now, because a new process could not create them later: the others do not repeat it.
        create_validation_loaders(self._trainer)
        hook_batches(self._trainer, self._before_batch, self._before_other_code)

    def end(self) -> None:
        """Stop to capture states."""
        unhook_batches(self._trainer)

    def _before_batch(self) -> bool:
        """Return whether the state of another rank begins after the batch."""
        if self._training.is_joining:
            is_after_batch = []
            self._training.join(lambda state: is_after_batch.append(self._load(state)))
            if is_after_batch[0]:
                return True
        self._capture(is_after_batch=False)
        return False

    def _before_other_code(self) -> None:
        self._capture(is_after_batch=True)

    def _capture(self, *, is_after_batch: bool) -> None:
        self._training.capture(lambda: self._read(is_after_batch), repeats_code=is_after_batch)

    def _read(self, is_after_batch: bool) -> dict[str, Any]:
        trainer = self._trainer
        (batches,) = find_resumable_batches(trainer)
        return {
            "is_after_batch": is_after_batch,
            "fit": read_fit_state(trainer),
            "torchmetrics": read_metric_states(self._metrics),
            "trainer": {
                "should_stop": trainer.should_stop,
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
            },
            "position": batches.record(),
            "schedulers": _describe_schedulers(trainer),
            "own_states": [copy.deepcopy(each.state_dict()) for each in _list_stateful(trainer)],
            "callbacks": [
                (each.state_key, copy.deepcopy(each.state_dict()), _read_other_state(each))
                for each in trainer.callbacks
            ],
        }

    def _load(self, state: dict[str, Any]) -> bool:
        """Load the state of another rank. Return whether it was captured after a batch."""
        trainer = self._trainer
        names = [name for name, _, _ in state["callbacks"]]
        if names != [each.state_key for each in trainer.callbacks]:
            raise CannotRecoverError("the new process has other callbacks")
        if state["schedulers"] != _describe_schedulers(trainer):
            raise CannotRecoverError("the new process has other schedulers")
        for each, values in zip(_list_stateful(trainer), state["own_states"], strict=True):
            if values:
                each.load_state_dict(values)
        load_metric_states(self._metrics, state["torchmetrics"])
        load_fit_state(trainer, state["fit"])
        vars(trainer).update(state["trainer"])
        for callback, (_, callback_state, other_state) in zip(
            trainer.callbacks, state["callbacks"], strict=True
        ):
            if callback_state:
                callback.load_state_dict(callback_state)
            vars(callback).update(other_state)
        (batches,) = find_resumable_batches(trainer)
        batches.continue_at(EpochPosition(**state["position"]))
        restart_train_loaders(trainer)
        warn_of_first_epoch(trainer)
        return bool(state["is_after_batch"])


def _gather(tensor: Tensor, group: object = None) -> list[Tensor]:
    """Gather a state of torchmetrics, also if its shape differs between ranks."""
    return collective.all_gather(tensor)


def _read_other_state(callback: Any) -> dict[str, Any]:
    """Return attributes of a callback that `state_dict()` omits, and that decide when it saves.

    All ranks must save at the same steps.
    """
    if isinstance(callback, RayTrainReportCallback | SaveOnRequest):
        return {"latest_step": callback.latest_step}
    return read_saving_state(callback)


def _describe_schedulers(trainer: Any) -> list[tuple[str, str, int]]:
    return [
        (type(each.scheduler).__name__, each.interval, each.frequency)
        for each in trainer.lr_scheduler_configs
    ]


def _list_stateful(trainer: Any) -> list[Any]:
    """Return the data module, if any, and the schedulers that do not belong to torch."""
    schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
    own = [each for each in schedulers if not isinstance(each, LRScheduler | ReduceLROnPlateau)]
    return own if trainer.datamodule is None else [trainer.datamodule, *own]


def check_settings(trainer: Any) -> None:
    """Check that `fit` can be recovered in place.

    Raises:
        ValueError: A setting does not allow it.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    if not module.automatic_optimization:
        raise _make_error("automatic_optimization=False", "Use automatic optimization")
    if trainer.reload_dataloaders_every_n_epochs:
        setting = f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}"
        raise _make_error(setting, "Remove it")
    if validates_by_time(trainer):
        raise _make_error("a time as val_check_interval", "Set a number of batches")
    if averages_models(strategy):
        raise _make_error("model_averaging_period", "Remove it")
    for name, remedy in _UNSUPPORTED_CALLBACKS.items():
        kind = import_lightning_class(f"callbacks.{name}", strategy.package)
        if any(isinstance(each, kind) for each in trainer.callbacks):
            raise _make_error(f"the callback {name}", remedy)


def check_loaders(trainer: Any) -> None:
    """Check that a new process can begin in the middle of an epoch.

    Raises:
        ValueError: It cannot.
    """
    if reads_batches_in_module(trainer):
        raise _make_error("training_step(dataloader_iter)", "Use training_step(batch, batch_idx)")
    if len(find_resumable_batches(trainer)) != 1:
        raise _make_error(
            "these training data",
            "Return one torch DataLoader of a dataset with a length from train_dataloader(), with "
            "the default sampler or shuffle=True, and without use_distributed_sampler=False",
        )


def _make_error(setting: str, remedy: str) -> ValueError:
    return ValueError(
        f"FailureConfig(recovery='in_place') does not work with {setting}. {remedy}, or set "
        "recovery='restart'."
    )
