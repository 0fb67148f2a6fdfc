"""Store the epochs of data loaders that Accelerate has prepared in checkpoints.

The order of a loader with a seedable sampler depends on its attribute `iteration`, which
`Accelerator.save_state()` omits. After a restart, each loader would repeat the order of epoch 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler

from drawbar.accelerate._compat import get_prepared_loaders
from drawbar.torch.integration import has_exact_state, is_huggingface_stream
from drawbar.train import get_context
from drawbar.train.backend import register_data_position


def find_sampler(loader: Any) -> Any:
    """Find the object that determines the order of a data loader that Accelerate has prepared.

    Accelerate's `get_sampler` finds no sampler if the batches are split between processes, unless
    the sampler is seedable.

    Args:
        loader: The data loader.

    Returns:
        The sampler, or a custom batch sampler that has none.

    Example:
        >>> find_sampler(accelerator.prepare(DataLoader(dataset, shuffle=True)))
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    if isinstance(batch_sampler, BatchSamplerShard):
        batch_sampler = batch_sampler.batch_sampler
    batches = getattr(loader, "sampler", None) if batch_sampler is None else batch_sampler
    return getattr(batches, "sampler", batches)


SkipFirstBatches = Callable[..., Any]


class LoaderEpoch:
    """Epoch of a data loader that Accelerate has prepared.

    Args:
        loader: The data loader, which counts its epochs in the attribute `iteration`.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._set_epoch = loader.set_epoch
        self._remainder: Any = None  # result of skip_first_batches() that may be iterated now
        self._running: int | None = None  # epoch of the newest iteration
        self._is_over = False  # the checkpoint was saved with the last batch of an epoch
        loader.set_epoch = self.set_epoch  # the loader calls it at the start of each iteration

    def get(self) -> dict[str, Any]:
        """Return the epoch that is running, or the next one after the last batch."""
        newest = self._loader if self._remainder is None else self._remainder
        # Accelerate counts the epoch when the loop requests another batch after the last one.
        is_over = newest.end_of_dataloader and newest.iteration == self._running
        return {"epoch": newest.iteration + is_over, "is_over": is_over or self._is_over}

    def restore(self, recorded: dict[str, Any]) -> None:
        """Continue with the epoch of a checkpoint."""
        self.set_epoch(recorded["epoch"])
        self._is_over = recorded["is_over"]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the complete loader. After a remainder, its next iteration has another.

        Accelerate counts an epoch that the user left by `break` as not complete.
        """
        if self._remainder is not None and epoch == self._loader.iteration:
            epoch = self._remainder.iteration
        self._remainder, self._is_over = None, False
        is_called_by_user = self._loader.end_of_dataloader  # an iteration resets it before
        self._running = None if is_called_by_user else epoch
        self._set_epoch(epoch)

    def follow(self, remainder: Any, num_skipped: int) -> None:
        """Continue after a remainder, which is a separate loader that counts its epoch."""
        if self._is_over and num_skipped:  # all batches of the previous epoch are skipped
            remainder.iteration, self._is_over = self._loader.iteration - 1, False
            return
        self._remainder, self._running = remainder, remainder.iteration


def track_loader_epochs(accelerator: Accelerator) -> None:
    """Store the epochs of the Accelerator's loaders in checkpoints, and restore them.

    Args:
        accelerator: Accelerator that has prepared the loaders.
    """
    loaders = [each for each in get_prepared_loaders(accelerator) if hasattr(each, "iteration")]
    epochs = {id(loader): LoaderEpoch(loader) for loader in loaders}
    for number, epoch in enumerate(epochs.values()):
        recorded = register_data_position(f"accelerate.data_loader-{number}", epoch.get)
        if recorded is not None:
            epoch.restore(recorded)
    untyped: Any = accelerator
    untyped.skip_first_batches = _follow_after_skip(type(accelerator).skip_first_batches, epochs)
    warn_of_unknown_order(loaders)
    warn_of_lost_rows(loaders)


def _follow_after_skip(skip: SkipFirstBatches, epochs: dict[int, LoaderEpoch]) -> SkipFirstBatches:
    """Return `skip_first_batches` that counts the epoch in the complete loader, too.

    It returns a copy of the loader. Accelerate counts the end of the epoch only in that copy, so
    the next loop over the complete loader would repeat the same order.
    """

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        remainder = skip(None, dataloader, num_batches)
        if epoch := epochs.get(id(dataloader)):
            remainder.iteration = dataloader.iteration  # 0 before Accelerate 1.15
            epoch.follow(remainder, num_batches)
        return remainder

    return skip_first_batches


def warn_of_unknown_order(loaders: list[Any]) -> None:
    """Warn on rank 0 of loaders whose order a restart cannot repeat.

    Args:
        loaders: Data loaders that Accelerate has prepared.
    """
    unknown = sorted(
        {type(find_sampler(loader)).__name__ for loader in loaders if _is_lost(loader)}
    )
    if not unknown or get_context().get_world_rank():
        return
    warnings.warn(
        f"After a restart, a data loader with {', '.join(unknown)} begins with another order of "
        "its samples: some samples of the epoch are trained twice and others never. Use "
        "Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)), a "
        "custom sampler with set_epoch(), or drawbar.torch.prepare_data_loader instead of "
        "accelerator.prepare for the loader.",
        stacklevel=4,
    )


def _is_lost(loader: Any) -> bool:
    """Return whether the order of a loader does not follow from its epoch."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    sampler = find_sampler(loader)
    if isinstance(sampler, SequentialSampler | DistributedSampler):
        return False
    return not hasattr(sampler, "set_epoch")


def warn_of_lost_rows(loaders: list[Any]) -> None:
    """Warn on rank 0 of loaders whose state lacks rows, which a restart loses.

    Args:
        loaders: Data loaders that Accelerate has prepared.
    """
    has_lost_rows = any(
        getattr(loader, "use_stateful_dataloader", False)
        and is_huggingface_stream(loader.dataset)
        and not has_exact_state(loader.dataset)
        for loader in loaders
    )
    if has_lost_rows and not get_context().get_world_rank():
        warnings.warn(
            "With use_stateful_dataloader=True, a restart loses the rows in the shuffle buffer of "
            "a Hugging Face stream, because its state does not contain them. Remove "
            "use_stateful_dataloader and call accelerator.skip_first_batches, or use "
            "drawbar.torch.prepare_data_loader instead of accelerator.prepare for the loader.",
            stacklevel=4,
        )
