"""Ray Data's shards as datasets for the Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length


def is_shard(data: object) -> bool:
    """Whether this is what `get_dataset_shard` gives."""
    return hasattr(data, "iter_torch_batches")


def is_batch_iterable(data: object) -> bool:
    """Whether these are batches of Ray Data, such as `iter_torch_batches` gives."""
    plain = isinstance(data, Iterable) and not isinstance(data, IterableDataset)
    return plain and not hasattr(data, "__getitem__")


class ShardIterableDataset(IterableDataset[object]):
    """The rows of a shard, or its batches as they are; each iteration is an epoch.

    A shard begins, after a restart, with the rest of the epoch. When the checkpoint was made
    at the very end of one there is no rest, and the Trainer is in the next epoch already.
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
        return len(self._items)  # type: ignore[arg-type]  # raises TypeError if it is not known


class EpochFromStepsCallback(TrainerCallback):
    """Tells the epoch by the steps, where the Trainer counts from the rest of one.

    With data of unknown length there is no such number, and the Trainer's stays.
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
