"""Adapt to an epoch that resumes in its middle, in which Lightning skips `on_train_epoch_start`."""

from __future__ import annotations

import warnings
from typing import Any

from drawbar.lightning._package import import_lightning_class

_HOOK = "on_train_epoch_start"
_LIBRARIES = ("lightning", "pytorch_lightning", "drawbar")


def resume_within_epoch(trainer: Any) -> None:
    """Set what callbacks of Lightning set at the start of an epoch, and warn of other hooks.

    Args:
        trainer: Trainer of this worker, whose `fit` begins.
    """
    if not getattr(trainer.fit_loop, "restarted_mid_epoch", False):
        return  # also Lightning before 2.5, which calls the hook
    package = trainer.strategy.package
    scheduler = import_lightning_class("callbacks.GradientAccumulationScheduler", package)
    for each in trainer.callbacks:
        if isinstance(each, scheduler):
            factor = each.get_accumulate_grad_batches(trainer.current_epoch)
            trainer.accumulate_grad_batches = factor
    names = _list_own_hooks(trainer)
    if names and trainer.is_global_zero:
        warnings.warn(
            f"fit() resumes within epoch {trainer.current_epoch}. Lightning does not call {names} "
            "again in this epoch. Set the same values in on_train_start, or save checkpoints at "
            "the end of epochs only.",
            stacklevel=2,
        )


def warn_of_first_epoch(trainer: Any) -> None:
    """Warn of hooks that a new process has called for epoch 0, and not for the current epoch.

    Args:
        trainer: Trainer of a process that has received the state of another rank.
    """
    names = _list_own_hooks(trainer)
    if names and trainer.current_epoch > 0:
        warnings.warn(
            f"A new process continues within epoch {trainer.current_epoch}, but has called {names} "
            "for epoch 0. Set values that depend on the epoch in on_train_batch_start, or store "
            "them in buffers of the module or in state_dict() of the callback.",
            stacklevel=2,
        )


def _list_own_hooks(trainer: Any) -> str:
    owners = (*trainer.callbacks, trainer.lightning_module)
    return ", ".join(f"{type(each).__name__}.{_HOOK}" for each in owners if _has_own_hook(each))


def _has_own_hook(owner: object) -> bool:
    """Return whether the user has defined the hook of a callback or module."""
    definer = next(each for each in type(owner).__mro__ if _HOOK in vars(each))
    return definer.__module__.partition(".")[0] not in _LIBRARIES
