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
    owners = (*trainer.callbacks, trainer.lightning_module)
    skipped = [each for each in owners if _has_own_hook(each)]
    if skipped and trainer.is_global_zero:
        names = ", ".join(f"{type(each).__name__}.{_HOOK}" for each in skipped)
        warnings.warn(
            f"fit() resumes within epoch {trainer.current_epoch}. Lightning does not call {names} "
            "again in this epoch. Set the same values in on_train_start, or save checkpoints at "
            "the end of epochs only.",
            stacklevel=2,
        )


def _has_own_hook(owner: object) -> bool:
    """Return whether the user has defined the hook of a callback or module."""
    definer = next(each for each in type(owner).__mro__ if _HOOK in vars(each))
    return definer.__module__.partition(".")[0] not in _LIBRARIES
