"""Store the position of training data loaders in checkpoints.

Lightning restores the number of processed batches, but its data loaders restart at the first batch.
A run resumed in mid-epoch would repeat the beginning of the data and skip the end. This module
replaces the sampler that Lightning adds to a loader by one with the same order that can start at
any position, with any number of workers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from drawbar.torch.integration import EpochPosition, EpochSampler, num_rank_items
from drawbar.train import Checkpoint
from drawbar.train.backend import register_data_position

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class TrainLoaderTracker:
    """Track the training data loaders of a Trainer and the positions from which they resume."""

    def __init__(self) -> None:
        self._numbers = Counter[int]()  # loaders created per epoch
        self._recorded: dict[str, Any] = {}

    def reset_numbering(self) -> None:
        """Restart the numbering, so that loader names do not depend on earlier `fit` calls.

        An earlier `fit` or a run of Lightning's `Tuner` may be missing in the next attempt.
        """
        self._numbers.clear()

    def resume_from(self, checkpoint: Checkpoint) -> None:
        """Resume loaders that are created from now on at the positions of a checkpoint."""
        manifest = checkpoint.manifest
        self._recorded = {} if manifest is None else dict(manifest.data_positions)

    def make_resumable(self, dataloader: object, trainer: Trainer) -> object:
        """Return a loader that resumes and whose position is stored in checkpoints.

        This is a copy of a `DataLoader` with torch's `DistributedSampler`, which Lightning adds
        in place of a random or sequential sampler. Any other object is returned unchanged.
        """
        if not isinstance(dataloader, DataLoader):
            return dataloader
        batches = dataloader.batch_sampler
        if type(dataloader.sampler) is not DistributedSampler or type(batches) is not BatchSampler:
            return dataloader
        sampler = _to_epoch_sampler(dataloader.sampler)
        loader = copy.copy(dataloader)
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        vars(loader).update(sampler=sampler, batch_sampler=batches, _iterator=None)
        progress = LoaderPosition(sampler, batches, trainer.fit_loop)
        name = self._next_loader_name(trainer.current_epoch)
        register_data_position(name, progress.record)
        if recorded := self._recorded.pop(name, None):
            progress.resume_from(EpochPosition(**recorded))
        return loader

    def _next_loader_name(self, epoch: int) -> str:
        """Return a name for the epoch's next loader.

        The k-th loader of an epoch has the same name in every epoch and attempt.
        """
        self._numbers[epoch] += 1
        return f"lightning.train_dataloader-{self._numbers[epoch]}"


class ShardBatches:
    """Batches of a dataset shard. If an epoch has no batches left, the next epoch is returned.

    After a restart, the first iteration yields the rest of the epoch. If the checkpoint was saved
    at the end of an epoch, nothing is left, but Lightning has already started the next epoch.

    Args:
        batches: Result of `iter_torch_batches`; each iteration is one epoch.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    @staticmethod
    def is_shard_loader(dataloader: object) -> bool:
        """Return whether a loader is the result of `iter_torch_batches`."""
        return type(dataloader).__module__.startswith("drawbar.train.")

    def __iter__(self) -> Iterator[object]:
        is_empty = True
        for batch in self._batches:
            is_empty = False
            yield batch
        if is_empty:
            yield from self._batches

    def __len__(self) -> int:
        return len(self._batches)


def _to_epoch_sampler(sampler: DistributedSampler[int]) -> EpochSampler[int]:
    """Return a sampler with the same items in the same order that can start at any position."""
    all_items: DistributedSampler[int] = DistributedSampler(
        sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
    )
    return EpochSampler(
        all_items,
        rank=sampler.rank,
        world_size=sampler.num_replicas,
        seed=sampler.seed,
        drop_last=sampler.drop_last,
    )


class LoaderPosition:
    """Position of a loader, computed from Lightning's batch count.

    Lightning counts the batches of one rank. The position counts the samples of all ranks.
    """

    def __init__(self, sampler: EpochSampler[int], batches: BatchSampler, fit_loop: Any) -> None:
        self._sampler = sampler
        self._batches = batches
        self._items = batches.batch_size * sampler.num_replicas
        self._count = fit_loop.epoch_loop.batch_progress
        self._resumed: EpochPosition | None = None
        self._num_skipped_batches = 0  # batches of the resumed epoch before the resume

    def resume_from(self, position: EpochPosition) -> None:
        """Resume at a position and adjust Lightning's batch count.

        Lightning compares its batch count with the length of the loader to find the last batch. If
        the number of workers has changed, the restored count does not fit the remaining batches.
        """
        self._sampler.resume_from(position)
        if position.length is None:
            return
        correction = (
            len(self._batches)
            - self._num_remaining_batches(position)
            - self._count.current.processed
        )
        for counter in ("ready", "started", "processed", "completed"):
            setattr(
                self._count.current, counter, getattr(self._count.current, counter) + correction
            )
        self._resumed, self._num_skipped_batches = position, self._count.current.processed

    def _num_remaining_batches(self, position: EpochPosition) -> int:
        assert position.length is not None
        sampler, batches = self._sampler, self._batches
        items = num_rank_items(
            position.length - position.consumed, sampler.num_replicas, drop_last=sampler.drop_last
        )
        return num_rank_items(items, batches.batch_size, drop_last=batches.drop_last)

    def record(self) -> dict[str, object]:
        """Return the position as plain values."""
        start = self._sampler.current_position
        if start.length is None:
            return asdict(start)
        num_skipped = self._num_skipped_batches if start == self._resumed else 0
        position = start.advance((self._count.current.processed - num_skipped) * self._items)
        if self._count.is_last_batch or position.consumed == position.length:
            position = EpochPosition(seed=position.seed, epoch=position.epoch + 1)
        return asdict(position)
