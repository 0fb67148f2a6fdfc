"""How far Lightning's training loaders have come, put into every checkpoint.

Lightning's loops remember how many batches were trained on, but a loader begins anew, so that a run
that goes on in mid-epoch would see the beginning of the data again and never the end. Here the
sampler that Lightning has put into a loader is exchanged for one that gives the same order and can
begin later in it, on any number of workers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from drawbar.torch.sampling import EpochPosition, EpochSampler, num_rank_items
from drawbar.train import Checkpoint
from drawbar.train.backend import register_data_position

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class TrainLoaderTracker:
    """The training loaders of a Trainer, and where they go on."""

    def __init__(self) -> None:
        self._numbers = Counter[int]()  # loaders made for an epoch
        self._recorded: dict[str, Any] = {}

    def reset_numbering(self) -> None:
        """Have the loaders that are made next named like those of any other `fit`.

        One may follow another in this attempt, or Lightning's `Tuner`, that does not in the next.
        """
        self._numbers.clear()

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """Have the loaders that are made next begin where this checkpoint was made."""
        manifest = checkpoint.manifest
        self._recorded = {} if manifest is None else dict(manifest.data_positions)

    def make_resumable(self, dataloader: object, trainer: Trainer) -> object:
        """Give a loader whose position is in the checkpoints, begun where the run goes on.

        That is a copy of a `DataLoader` that has torch's own `DistributedSampler`, which Lightning
        puts in place of a random or sequential one; any other object is given back as it is.
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
            progress.go_on_from(EpochPosition(**recorded))
        return loader

    def _next_loader_name(self, epoch: int) -> str:
        """Name a loader by its number, which begins anew when loaders are made anew."""
        self._numbers[epoch] += 1
        return f"lightning.train_dataloader-{self._numbers[epoch]}"


class ShardBatches:
    """Batches of a dataset's shard. A pass that has none is followed by the next one.

    After a restart the first pass gives what is left of the epoch. Where the checkpoint was made at
    its very end that is nothing, and Lightning is in the next epoch already.

    Args:
        batches: As `iter_torch_batches` gives them; each iteration is a pass.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    @staticmethod
    def is_shard_loader(dataloader: object) -> bool:
        """Whether a loader gives such batches: it is of no class of torch's or the user's then."""
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


def _to_epoch_sampler(given: DistributedSampler[int]) -> EpochSampler[int]:
    """Give a sampler with the same items in the same order, that can begin anywhere in it."""
    whole: DistributedSampler[int] = DistributedSampler(
        given.dataset, num_replicas=1, rank=0, shuffle=given.shuffle, seed=given.seed
    )
    return EpochSampler(
        whole,
        rank=given.rank,
        world_size=given.num_replicas,
        seed=given.seed,
        drop_last=given.drop_last,
    )


class LoaderPosition:
    """Lightning's count of batches, as samples that all ranks together have consumed."""

    def __init__(self, sampler: EpochSampler[int], batches: BatchSampler, fit_loop: Any) -> None:
        self._sampler = sampler
        self._batches = batches
        self._items = batches.batch_size * sampler.num_replicas
        self._count = fit_loop.epoch_loop.batch_progress
        self._resumed: EpochPosition | None = None
        self._num_skipped_batches = 0  # batches of the resumed epoch before it was resumed

    def go_on_from(self, position: EpochPosition) -> None:
        """Begin there, and have Lightning's count say how many batches of the epoch are left.

        They are others than it has recorded if the number of workers has changed.
        """
        self._sampler.resume_from(position)
        if position.length is None:
            return
        correction = (
            len(self._batches)
            - self._num_remaining_batches(position)
            - self._count.current.processed
        )
        for each in ("ready", "started", "processed", "completed"):
            setattr(self._count.current, each, getattr(self._count.current, each) + correction)
        self._resumed, self._num_skipped_batches = position, self._count.current.processed

    def _num_remaining_batches(self, position: EpochPosition) -> int:
        assert position.length is not None
        sampler, batches = self._sampler, self._batches
        items = num_rank_items(
            position.length - position.consumed, sampler.num_replicas, drop_last=sampler.drop_last
        )
        return num_rank_items(items, batches.batch_size, drop_last=batches.drop_last)

    def record(self) -> dict[str, object]:
        """Give the position as plain values."""
        start = self._sampler.current_position
        if start.length is None:
            return asdict(start)
        before = self._num_skipped_batches if start == self._resumed else 0
        now = start.advance((self._count.current.processed - before) * self._items)
        if self._count.is_last_batch or now.consumed == now.length:
            now = EpochPosition(seed=now.seed, epoch=now.epoch + 1)
        return asdict(now)
