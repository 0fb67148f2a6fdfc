"""Store the position of training data loaders in checkpoints.

Lightning restores the number of processed batches, but its data loaders restart at the first batch.
A run resumed in mid-epoch would repeat the beginning of the data and skip the end. This module
replaces the sampler that Lightning adds to a loader by one with the same order that can start at
any position, with any number of workers.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from drawbar.lightning._compat import (
    get_train_loaders,
    is_creating_train_loaders,
    undo_step_count,
)
from drawbar.lightning._global_batch_size import find_global_batch_size
from drawbar.torch.integration import (
    EpochPosition,
    EpochSampler,
    iter_complete_steps,
    num_rank_items,
)
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

        An earlier `fit`, or a search of a learning rate, may be missing in the next attempt.
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
        global_batch = find_global_batch_size(trainer)
        if global_batch is not None and is_creating_train_loaders(trainer):
            global_batch.check_loader(dataloader)
        else:
            global_batch = None
        if not isinstance(dataloader, DataLoader):
            return dataloader
        batches = dataloader.batch_sampler
        if type(dataloader.sampler) is not DistributedSampler or type(batches) is not BatchSampler:
            return dataloader
        sampler = _to_epoch_sampler(dataloader.sampler)
        loader = copy.copy(dataloader)
        batches = ResumableBatches(sampler, batches.batch_size, batches.drop_last, trainer)
        if global_batch is not None:
            batches.multiple = global_batch.accumulation_steps
        vars(loader).update(sampler=sampler, batch_sampler=batches, _iterator=None)
        name = self._next_loader_name(trainer.current_epoch)
        register_data_position(name, batches.record)
        if recorded := self._recorded.pop(name, None):
            batches.resume_from(EpochPosition(**recorded))
        return loader

    @staticmethod
    def align_batch_count(trainer: Trainer) -> None:
        """Set Lightning's batch count to the positions at which the loaders resume.

        Lightning compares its batch count with the length of the loaders to find the last batch.
        The count that it restored does not fit if the number of workers has changed, or if the
        optimizer step for the last batches was missing in the checkpoint.
        """
        batches = find_resumable_batches(trainer)
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        progress, window = epoch_loop.batch_progress, trainer.accumulate_grad_batches
        saved = progress.current.processed
        global_batch = find_global_batch_size(trainer)
        saved_window = (global_batch and global_batch.saved_accumulation_steps) or window
        if not batches:
            if epoch_loop.restarting and saved and not progress.is_last_batch:
                _warn_of_other_batches(trainer, saved)
        elif any(each.is_resumed for each in batches):
            count = _count_batches(trainer, [each.num_batches_before_resume for each in batches])
            is_on_step = not count % window and not epoch_loop.restarted_on_last
            if saved % saved_window and is_on_step:
                undo_step_count(trainer)
            for counts in (progress.current, progress.total):
                for name in ("ready", "started", "processed", "completed"):
                    setattr(counts, name, getattr(counts, name) + count - saved)
            for each in batches:
                each.shift(count - saved)

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
        return type(dataloader).__module__.startswith("drawbar._data.")

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


class ResumableBatches(BatchSampler):
    """Batches of a loader, with a position that is computed from Lightning's batch count.

    Lightning counts the batches of one rank. The position counts the samples of all ranks. If
    Lightning reads several loaders together, a shorter one may end before the epoch or be read
    several times; see the modes of Lightning's `CombinedLoader`.
    """

    def __init__(
        self, sampler: EpochSampler[int], batch_size: int, drop_last: bool, trainer: Trainer
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self._sampler = sampler
        self._trainer = trainer
        self._epoch: int | None = None  # epoch of Lightning in which the newest iteration began
        # Batch count and position at the start of each iteration of this epoch.
        self._starts: list[tuple[int, EpochPosition]] = []
        self.multiple = 1
        """Number of batches of which an epoch has a multiple; the last ones are dropped."""
        self.is_resumed = False
        self.num_batches_before_resume = 0

    def resume_from(self, position: EpochPosition) -> None:
        """Begin the next iteration at a position."""
        self._sampler.resume_from(position)
        if position.length is not None:
            items = num_rank_items(
                position.length - position.consumed,
                self._sampler.num_replicas,
                drop_last=self._sampler.drop_last,
            )
            remaining = num_rank_items(items, self.batch_size, drop_last=self.drop_last)
            remaining -= remaining % self.multiple
            self.is_resumed = True
            self.num_batches_before_resume = len(self) - remaining

    def __len__(self) -> int:
        length = super().__len__()
        return length - length % self.multiple

    def continue_at(self, position: EpochPosition) -> None:
        """Begin the next iteration at the position of another rank in Lightning's epoch."""
        self._epoch = None
        self._sampler.set_epoch(position.epoch)
        self._sampler.resume_from(position)

    def shift(self, correction: int) -> None:
        """Adapt to a correction of Lightning's batch count before the first batch."""
        self._starts = [(count + correction, position) for count, position in self._starts]
        if self._epoch is not None:
            self._epoch = self._current_epoch

    def __iter__(self) -> Iterator[list[int]]:
        if self._epoch == self._current_epoch:  # again in this epoch, in the same order
            self._sampler.set_epoch(self._sampler.current_position.epoch)
        else:
            self._starts.clear()
        self._epoch = self._current_epoch
        count = self._count.current.processed
        batches = iter_complete_steps(super().__iter__(), self.multiple)
        first = next(batches, None)
        self._starts.append((count, self._sampler.current_position))
        if first is not None:
            yield first
            yield from batches

    def record(self) -> dict[str, object]:
        """Return the position as plain values.

        This is the position after the last batch with an optimizer step, since a checkpoint does
        not contain the gradients of later ones.
        """
        if not self._starts:
            return asdict(self._sampler.next_position)
        current = self._count.current
        is_over = self._count.is_last_batch and current.processed == current.ready
        if is_over or self._epoch != self._current_epoch:
            newest = self._starts[-1][1]
            return asdict(EpochPosition(seed=newest.seed, epoch=newest.epoch + 1))
        count = current.processed
        if find_resumable_batches(self._trainer):
            count -= count % self._trainer.accumulate_grad_batches
        begun = [start for start in self._starts if start[0] <= count]
        first, start = begun[-1] if begun else self._starts[0]
        items = max(0, count - first) * self.batch_size * self._sampler.num_replicas
        return asdict(start.advance(items))

    @property
    def _count(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress

    @property
    def _current_epoch(self) -> int:
        epochs: Any = self._trainer.fit_loop.epoch_progress.current
        return int(epochs.processed)


def find_resumable_batches(trainer: Trainer) -> list[ResumableBatches]:
    """Find the batches of all training loaders; none if a loader is not resumable."""
    batches = [getattr(each, "batch_sampler", None) for each in get_train_loaders(trainer)[0]]
    found = [each for each in batches if isinstance(each, ResumableBatches)]
    return found if len(found) == len(batches) else []


def _count_batches(trainer: Trainer, counts: list[int]) -> int:
    """Return Lightning's batch count for the batch counts of the training loaders."""
    loaders, mode = get_train_loaders(trainer)
    lengths = [len(loader) for loader in loaders]
    ends_epoch = min(lengths) if mode == "min_size" else max(lengths)
    return counts[lengths.index(ends_epoch)]


def _warn_of_other_batches(trainer: Trainer, count: int) -> None:
    """Warn if loaders repeat batches of an interrupted epoch, or if gradients are lost."""
    loaders, _ = get_train_loaders(trainer)
    lost = count % trainer.accumulate_grad_batches
    if not trainer.is_global_zero:
        return
    if not all(map(_continues, loaders)):
        warnings.warn(
            f"fit() resumes after {count} batches of an epoch, but a training loader starts at "
            f"its first batch. It repeats {count} batches, and the last {count} of the epoch are "
            "not trained. Use the default sampler or shuffle=True, a loader with state_dict(), or "
            "save checkpoints at the end of epochs only.",
            stacklevel=2,
        )
    elif lost:
        warnings.warn(
            f"The checkpoint was saved {lost} batches after the last optimizer step. Their "
            "gradients are lost, since the training data loader cannot return these batches again. "
            "Save checkpoints after optimizer steps, for example with "
            "ModelCheckpoint(every_n_train_steps=...).",
            stacklevel=2,
        )


def _continues(loader: object) -> bool:
    is_resumable = isinstance(getattr(loader, "batch_sampler", None), ResumableBatches)
    return is_resumable or isinstance(loader, ShardBatches) or hasattr(loader, "state_dict")
