"""Track how much of a data loader the training function has consumed.

A batch counts when the training function receives it. The loader itself is ahead of that: its
worker processes load several batches in advance, and one more may be on its way to the GPU. All
ranks receive the same number of batches between two reports, so the position of all ranks is the
number of batches times the batch size times the world size.

A tracker may outlive its loader, so it must not keep the loader's dataset alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

from drawbar.torch._sampler import EpochPosition, EpochSampler

T = TypeVar("T")

_MAX_SHOWN_ROWS = 64


class SamplerPositionTracker:
    """Position of a loader whose sampler is an `EpochSampler`.

    The end of an iteration, also by `break`, ends its epoch. The next epoch is recorded then.

    Args:
        sampler: The loader's sampler or batch sampler.
        items_per_batch: Number of the sampler's items in a batch; 0 if it is unknown, so that only
            complete epochs count.

    Attributes:
        epoch_start: Epoch of the newest iteration, and its samples that were consumed before.
    """

    def __init__(self, sampler: EpochSampler[Any], items_per_batch: int) -> None:
        # A running iteration keeps the sampler alive.
        self._sampler = weakref.ref(sampler)
        self._rank_items_per_batch = items_per_batch
        self._items_per_batch = items_per_batch * sampler.num_replicas
        self._iteration = 0
        self._begin: EpochPosition | None = None  # of the running iteration
        self._next = sampler.next_position
        self._num_received = 0
        self._has_load_error, self._last_batch = False, ""
        self.epoch_start = (0, 0)

    @property
    def next_position(self) -> EpochPosition:
        """Position at which the next iteration would begin."""
        sampler = self._sampler()
        return self._next if sampler is None else sampler.next_position

    def resume_from(self, state: Any) -> None:
        """Resume from a recorded position."""
        self._resume(EpochPosition(**state))

    def follow(self, previous: PositionTracker) -> None:
        """Begin with the next epoch of another loader, with the same seed."""
        if isinstance(previous, SamplerPositionTracker):
            self._resume(previous.next_position)

    def _resume(self, position: EpochPosition) -> None:
        sampler = self._sampler()
        if sampler is not None:  # not `if sampler`, which calls its __len__
            sampler.resume_from(position)

    def start_epoch(self) -> None:
        """Begin an iteration."""
        self._iteration += 1
        self._begin = self.next_position
        self._next = EpochPosition(seed=self._begin.seed, epoch=self._begin.epoch + 1)
        sampler = self._sampler()
        if sampler is not None and sampler.is_left_out:
            self._next = self._begin
        self._num_received = 0
        self._has_load_error, self._last_batch = False, ""
        self.epoch_start = (self._begin.epoch, self._begin.consumed)

    def track(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches of the newest iteration."""
        counted = self._count(batches, self._iteration)
        # Start the generator: `zip` may end before it requests a batch, which ends the epoch, too.
        next(counted)
        return counted  # type: ignore[return-value]  # yields None only at its start

    def _count(self, batches: Iterator[T], iteration: int) -> Iterator[T | None]:
        try:
            yield None
            for batch in batches:
                if iteration == self._iteration:
                    self._num_received += 1
                yield batch
        except Exception:
            self._has_load_error = True
            raise
        finally:
            if iteration == self._iteration:
                # Now: after an exception, the loader may be deleted before the message is made.
                self._last_batch = self.describe_batch()
                if self._num_received == 0:
                    self._resume(self._next)
                self._begin = None

    def describe_batch(self) -> str:
        """Return the epoch and the rows of the batch that is being loaded or processed."""
        if self._last_batch:
            return self._last_batch
        sampler, size = self._sampler(), self._rank_items_per_batch
        number = self._num_received + self._has_load_error
        text = f"epoch {self.epoch_start[0]}"
        if sampler is None or not size or not number:
            return text
        rows = sampler.get_items((number - 1) * size, size)
        shown = ", ".join(map(str, rows[:_MAX_SHOWN_ROWS]))
        more = ", ..." if len(rows) > _MAX_SHOWN_ROWS else ""
        return f"{text}, rows {shown}{more} of the dataset" if rows else text

    @property
    def is_running(self) -> bool:
        """True between the begin and the end of an iteration."""
        return self._begin is not None

    def position_after(self, num_batches: int) -> object:
        """Return the position after more batches of the running iteration, at most at its end.

        Raises:
            RuntimeError: The samples of the iteration cannot be counted.
        """
        position = EpochPosition(**cast("dict[str, Any]", self.position()))
        position = replace(position, is_rollback=True)
        if not num_batches:
            return asdict(position)
        if position.length is None or not self._items_per_batch:
            raise RuntimeError(
                f"rollback(skip={num_batches}) needs a data loader with a length and a batch size. "
                "Set batch_size= in the loader, or set skip=0."
            )
        return asdict(position.advance(num_batches * self._items_per_batch))

    def position(self) -> object:
        """Return the position as a dict."""
        sampler = self._sampler()
        if self._begin is not None and self._num_received == 0:
            return asdict(self._begin)
        if self._begin is None or sampler is None:
            return asdict(self.next_position)
        return asdict(sampler.position_after(self._num_received * self._items_per_batch))


@runtime_checkable
class StatefulDataset(Protocol):
    """A dataset that can save and load its position as JSON values."""

    def state_dict(self) -> dict[str, object]:
        """Return the position."""
        ...

    def load_state_dict(self, state: dict[str, object], /) -> object:
        """Resume from a position."""
        ...


class DatasetStateTracker:
    """State of a dataset or loader with `state_dict`, while it is iterated.

    Nothing is recorded between two iterations, because the next one begins from the start.
    """

    epoch_start = (0, 0)

    def __init__(self, dataset: StatefulDataset) -> None:
        self._dataset = weakref.ref(dataset)
        self._is_running = False
        self._loaded: object = None

    def resume_from(self, state: Any) -> None:
        """Load a recorded state into the dataset."""
        self._loaded = state
        dataset = self._dataset()
        if dataset is not None:
            dataset.load_state_dict(state)

    def follow(self, previous: PositionTracker) -> None:
        """Begin from the start, after another loader."""

    def start_epoch(self) -> None:
        """Begin an iteration; nothing has been read from the dataset yet."""

    def track(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches. The iteration keeps the dataset alive."""
        return self._track(batches, self._dataset())

    def _track(self, batches: Iterator[T], dataset: StatefulDataset | None) -> Iterator[T]:
        self._is_running, self._loaded = True, None
        try:
            yield from batches
        finally:
            self._is_running = False

    def position(self) -> object:
        """Return the dataset's state, or the loaded one if no batch has been requested since."""
        dataset = self._dataset()
        if dataset is None or not self._is_running:
            return self._loaded
        return dataset.state_dict()


class EpochCounter:
    """Number of the epoch, for a loader whose samples cannot be counted.

    An interrupted epoch begins from its start after a restart.
    """

    def __init__(self) -> None:
        self._next = 0
        self._is_running = False
        self.epoch_start = (0, 0)

    def resume_from(self, state: Any) -> None:
        """Resume at a recorded epoch."""
        self._next = state["epoch"]

    def follow(self, previous: PositionTracker) -> None:
        """Begin with the next epoch of another loader."""
        if isinstance(previous, EpochCounter):
            self._next = previous._next

    def start_epoch(self) -> None:
        """Begin an iteration."""
        self.epoch_start = (self._next, 0)
        self._next += 1
        self._is_running = True

    def track(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches."""
        epoch = self._next
        try:
            yield from batches
        finally:
            if epoch == self._next:
                self._is_running = False

    def position(self) -> object:
        """Return the running epoch, or the next one."""
        return {"epoch": self._next - self._is_running, "consumed": 0}


PositionTracker: TypeAlias = SamplerPositionTracker | DatasetStateTracker | EpochCounter
