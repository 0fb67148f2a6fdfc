"""Use Ray Data shards as datasets of the Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length


def is_shard(data: object) -> bool:
    """Return whether this is a shard from `get_dataset_shard()`."""
    return hasattr(data, "iter_torch_batches")


def is_batch_iterable(data: object) -> bool:
    """Return whether these are batches of Ray Data, for example from `iter_torch_batches()`."""
    plain = isinstance(data, Iterable) and not isinstance(data, IterableDataset)
    return plain and not hasattr(data, "__getitem__")


class ShardIterableDataset(IterableDataset[object]):
    """Rows of a shard, or batches. Each iteration is an epoch.

    After a restart, the first iteration of a shard is the remainder of the interrupted epoch. If
    the checkpoint was saved at the end of an epoch, the remainder is empty, but the Trainer is
    already in the next epoch. So the shard is iterated again.
    """

    def __init__(self, data: Any) -> None:
        self._items: Iterable[object] = data.iter_rows() if is_shard(data) else data

    def __iter__(self) -> Iterator[object]:
        is_empty = True
        for item in self._items:
            is_empty = False
            yield item
        if is_empty:
            yield from self._items

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # raises TypeError if it is unknown


class EpochFromStepsCallback(TrainerCallback):
    """Compute the epoch from the number of steps, which also counts steps before a restart.

    The Trainer would count from the remainder of the interrupted epoch. With data of unknown
    length, the Trainer's value is kept.
    """

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Set the epoch before anything is logged or saved."""
        loader = kwargs["train_dataloader"]
        if has_length(loader):
            batches, accumulation_steps = len(loader), args.gradient_accumulation_steps
            num_epochs, steps = divmod(state.global_step, math.ceil(batches / accumulation_steps))
            state.epoch = num_epochs + steps * accumulation_steps / batches
