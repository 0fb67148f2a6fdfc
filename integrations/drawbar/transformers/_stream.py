"""Resume data without a length, such as an `IterableDataset`, in its interrupted epoch.

The Trainer reads it again and again until `max_steps`. It does not store the number of the epoch:
after a restart, it would skip the batches of all epochs together, and begin with epoch 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from drawbar.torch.integration import preserve_random_state
from drawbar.train.backend import register_data_position


class StreamLoader:
    """Data loader without a length, whose first iteration may be the rest of an epoch.

    The trained batches are read again and skipped. Unlike the state of a dataset, this also works
    with a shuffle buffer.

    Args:
        loader: The Trainer's data loader.
        accumulation_steps: Number of batches in a step of the optimizer.

    Attributes:
        epoch: Number of the epoch, also counted in earlier attempts.
        num_batches: Number of its batches that the Trainer has received.
        is_between_epochs: Whether the epoch has ended and the next one has not begun.
    """

    def __init__(self, loader: Any, accumulation_steps: int) -> None:
        self._loader = loader
        self._accumulation_steps = accumulation_steps
        self._first_epoch = self._num_trained = 0
        self.epoch = self.num_batches = 0
        self.is_between_epochs = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def resume_from(self, epoch: int, num_batches: int) -> None:
        """Begin with an epoch, after a number of batches."""
        self._first_epoch, self._num_trained = epoch, num_batches

    def position(self) -> tuple[int, int]:
        """Return the epoch, and the number of its batches that have been trained.

        Batches after the last step of the optimizer do not count: their gradients are not stored.
        """
        num_trained = self.num_batches - self.num_batches % self._accumulation_steps
        if self.is_between_epochs and num_trained == self.num_batches:
            return self.epoch + 1, 0
        return self.epoch, num_trained

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as the Trainer counts it: from 0 in each attempt."""
        self.epoch = self._first_epoch + epoch
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(self.epoch)

    def before_epoch(self) -> None:
        """Prepare an iteration. A callback may replace it."""

    def __iter__(self) -> Iterator[Any]:
        num_trained, self._num_trained = self._num_trained, 0
        for batch in self._skip(num_trained) if num_trained else self._start_epoch():
            self.num_batches += 1
            yield batch

    def _start_epoch(self) -> Iterator[Any]:
        self.before_epoch()
        self.num_batches, self.is_between_epochs = 0, False
        return iter(self._loader)

    def _skip(self, num_trained: int) -> Iterator[Any]:
        """Return the batches after the trained ones. If there are none, start the next epoch."""
        with preserve_random_state():
            batches = self._start_epoch()
            self.num_batches = sum(1 for _ in islice(batches, num_trained))
            first = list(islice(batches, 1))
        if first or self.num_batches == 0:
            return chain(first, batches)
        num_left = num_trained - self.num_batches
        self._first_epoch += 1
        self.set_epoch(self.epoch + 1 - self._first_epoch)
        return self._skip(num_left) if num_left else self._start_epoch()


class StreamCallback(TrainerCallback):
    """Store the position of a `StreamLoader` in checkpoints, and restore it."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Read the position in the checkpoint from which the Trainer resumes."""
        loader = kwargs["train_dataloader"]
        if not isinstance(loader, StreamLoader):
            return

        def get_position() -> dict[str, int]:
            epoch, num_batches = loader.position()
            return {"step": state.global_step, "epoch": epoch, "batches": num_batches}

        position = register_data_position("transformers.stream", get_position, add_index=True)
        if position is not None and position["step"] == state.global_step:
            loader.resume_from(position["epoch"], position["batches"])
        elif state.global_step:
            loader.resume_from(0, state.global_step * args.gradient_accumulation_steps)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Set the epoch before anything is logged or saved. The Trainer counts from the restart."""
        loader = kwargs["train_dataloader"]
        if isinstance(loader, StreamLoader):
            max_batches = state.max_steps * args.gradient_accumulation_steps
            state.epoch = loader.epoch + loader.num_batches / max_batches

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Count the epoch as ended, also if a callback has ended it."""
        loader = kwargs["train_dataloader"]
        if isinstance(loader, StreamLoader):
            loader.is_between_epochs = True
