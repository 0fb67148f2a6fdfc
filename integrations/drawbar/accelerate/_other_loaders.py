"""Warn of what Accelerate cannot do with data loaders that it has not prepared.

Such loaders, also those of `drawbar.torch.prepare_data_loader`, do not tell Accelerate that an
epoch ends, nor which samples were repeated to give all ranks the same number.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from drawbar.train import get_context


def warn_without_prepared_loader(accelerator: Accelerator) -> None:
    """Warn on rank 0 at the first call of a method that needs a prepared loader, without one.

    Args:
        accelerator: Accelerator of the worker.
    """
    untyped: Any = accelerator
    kind: Any = type(accelerator)
    if accelerator.num_processes > 1:
        untyped.gather_for_metrics = _with_warning(
            accelerator,
            functools.partial(kind.gather_for_metrics, accelerator),
            "gather_for_metrics() was called outside a loop over a data loader from "
            "accelerator.prepare, so it keeps samples that were repeated for the last batch. "
            "Prepare the loader for evaluation with accelerator.prepare.",
        )
    steps = accelerator.gradient_accumulation_steps
    if steps > 1 and accelerator.gradient_state.sync_with_dataloader:
        untyped.accumulate = _with_warning(
            accelerator,
            functools.partial(kind.accumulate, accelerator),
            "accumulate() was called outside a loop over a data loader from accelerator.prepare, "
            "so it does not know where an epoch ends. If the number of batches is not a multiple "
            f"of gradient_accumulation_steps={steps}, the last ones are accumulated with the next "
            "epoch, and the last ones of the training are lost. Prepare the loader with "
            "accelerator.prepare.",
        )


def _with_warning(accelerator: Accelerator, method: Callable[..., Any], text: str) -> Any:
    has_warned = get_context().get_world_rank() > 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_warned
        if not has_warned and not accelerator.gradient_state.in_dataloader:
            has_warned = True
            warnings.warn(text, stacklevel=2)
        return method(*args, **kwargs)

    return call
