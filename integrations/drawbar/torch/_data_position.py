"""How far the user has come with a loader, put into every checkpoint.

What counts is what the training function has received. The loader itself is ahead of that: its
processes load several batches in advance, and one more is on its way to the GPU. So batches are
counted where they are handed out, and multiplied by the samples of a batch and the number of ranks,
which all receive the same number of batches between two reports.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Protocol, TypeVar, runtime_checkable

from drawbar.torch._sampler import EpochSampler, Position
from drawbar.train.backend import keep_data_position

T = TypeVar("T")


class Counter(Protocol):
    """Something that counts the batches of a loader as they are handed out."""

    def begin(self) -> None:
        """Take note that an iteration begins; called before anything is loaded."""
        ...

    def count(self, batches: Iterator[T]) -> Iterator[T]:
        """Hand the batches of that iteration out."""
        ...

    def record(self) -> dict[str, object] | None:
        """Say what goes into a checkpoint made now."""
        ...


class BatchCounter:
    """The position of a loader whose sampler is an `EpochSampler`.

    An iteration that is over, by its end or because it was left by `break`, is followed by the next
    epoch, so that is what is recorded then.

    Args:
        sampler: The loader's sampler or batch sampler.
        items: How many of the sampler's items one batch holds; 0 if that is not known, so that only
            whole epochs count.
    """

    def __init__(self, sampler: EpochSampler[object], items: int) -> None:
        self._sampler = sampler
        self._items_of_all = items * sampler.num_replicas
        self._iteration = 0
        self._begin: Position | None = None  # of the iteration that goes on, if one does
        self._received = 0

    def begin(self) -> None:
        """Take note that an iteration begins."""
        self._iteration += 1
        self._begin = self._sampler.upcoming
        self._received = 0

    def count(self, batches: Iterator[T]) -> Iterator[T]:
        """Hand the batches of the newest iteration out."""
        return self._count(batches, self._iteration)

    def _count(self, batches: Iterator[T], iteration: int) -> Iterator[T]:
        try:
            for batch in batches:
                if iteration == self._iteration:
                    self._received += 1
                yield batch
        finally:
            if iteration == self._iteration:
                self._begin = None

    def record(self) -> dict[str, object]:
        """Give the position as plain values."""
        if self._begin is None:
            return asdict(self._sampler.upcoming)
        if self._received == 0:
            return asdict(self._begin)
        return asdict(self._sampler.current.after(self._received * self._items_of_all))


@runtime_checkable
class Stateful(Protocol):
    """A dataset that knows how far it has been read, as plain values."""

    def state_dict(self) -> dict[str, object]:
        """Give the position."""
        ...

    def load_state_dict(self, state: dict[str, object], /) -> object:
        """Go on from a position."""
        ...


class StateCounter:
    """The position of a dataset that knows it: its own `state_dict`, while it is iterated."""

    def __init__(self, dataset: Stateful) -> None:
        self._dataset = dataset
        self._running = False
        self._recorded: dict[str, object] | None = None

    def go_on_from(self, state: dict[str, object]) -> None:
        """Have the dataset begin there."""
        self._recorded = state
        self._dataset.load_state_dict(state)

    def begin(self) -> None:
        """Nothing has been taken from the dataset yet."""

    def count(self, batches: Iterator[T]) -> Iterator[T]:
        """Hand the batches out."""
        self._running, self._recorded = True, None
        try:
            yield from batches
        finally:
            self._running = False

    def record(self) -> dict[str, object] | None:
        """Give the dataset's state; nothing after an iteration, since the next begins anew."""
        if not self._running:
            return self._recorded
        return self._dataset.state_dict()


def keep(counter: Counter, name: str | None) -> Any:
    """Record the position of a loader as long as it lives.

    Args:
        counter: Counts the loader's batches.
        name: Name of the loader, or None to number it.

    Returns:
        What the checkpoint has recorded that this attempt goes on from, None if nothing.
    """
    alive = weakref.ref(counter)

    def record() -> dict[str, object] | None:
        counter = alive()
        return None if counter is None else counter.record()

    if name is None:
        return keep_data_position("data_loader", record, numbered=True)
    return keep_data_position(f"data_loader:{name}", record)
