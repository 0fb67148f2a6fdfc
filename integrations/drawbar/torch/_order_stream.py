"""Draw the order of a sampler in an isolated random state, completely or block by block."""

from __future__ import annotations

import random
import threading
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch

T = TypeVar("T")

# Random generators belong to the process, and the ranks may be threads of one process.
_lock = threading.Lock()


class OrderRandom:
    """Random state in which a sampler draws, separate from the state of the process.

    The first `with random.drawing()` starts from the seed, and each later one continues where the
    previous one ended. So all ranks draw the same order, and the training loop may draw random
    numbers in between.

    Covers Python's `random`, NumPy's global generator, PyTorch's CPU generator, and the attribute
    `generator` of the sampler and of its `sampler`. A sampler whose `generator` is None gets one,
    so that PyTorch's samplers do not depend on other threads of the process.

    Args:
        source: The sampler or batch sampler.
        seed: The same number on every rank.
    """

    def __init__(self, source: object, seed: int) -> None:
        samplers = [
            sampler
            for sampler in (source, getattr(source, "sampler", None))
            if "generator" in getattr(sampler, "__dict__", {})
        ]
        self._added = [
            (sampler, torch.Generator().manual_seed(seed))
            for sampler in samplers
            if vars(sampler)["generator"] is None
        ]
        existing = (vars(sampler)["generator"] for sampler in samplers)
        self._generators = [
            torch.default_generator,
            *(generator for generator in existing if isinstance(generator, torch.Generator)),
        ]
        self._seed = seed
        self._state: Sequence[Any] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Make this the random state of the process."""
        # Use a `with` statement: an interrupt at any line must not leave the lock acquired.
        with _lock:
            outer_state = self._capture()
            try:
                for sampler, generator in self._added:
                    vars(sampler)["generator"] = generator
                self._activate()
                yield
            finally:
                try:
                    self._state = self._capture()
                finally:
                    # Here and not in a function, because an interrupt can be raised when a function
                    # begins. It is raised once.
                    try:
                        self._reset(outer_state)
                    except BaseException:
                        self._reset(outer_state)
                        raise

    def _reset(self, outer_state: Sequence[Any]) -> None:
        self._restore(outer_state)
        for sampler, _ in self._added:
            vars(sampler)["generator"] = None

    def _activate(self) -> None:
        if self._state is not None:
            self._restore(self._state)
            return
        for generator in self._generators:
            generator.manual_seed(self._seed)
        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)  # NumPy accepts 32 bits

    def _capture(self) -> Sequence[Any]:
        states = [generator.get_state() for generator in self._generators]
        return states, random.getstate(), np.random.get_state()

    def _restore(self, captured: Sequence[Any]) -> None:
        states, python_state, numpy_state = captured
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class OrderStream(Generic[T]):
    """The order of one epoch of a sampler that has no length, read block by block.

    Memory does not depend on the length of the epoch, which may be infinite.

    Args:
        source: The sampler or batch sampler.
        seed: Seed of this epoch, the same on every rank.
        head_size: Number of first items to keep, with which the last turn is padded.

    Attributes:
        head: The first items of the epoch.
        length: Number of items of the epoch; None until the end has been read.
    """

    def __init__(self, source: Iterable[T], seed: int, head_size: int) -> None:
        self._random = OrderRandom(source, seed)
        with self._random.drawing():
            self._items = iter(source)
        self._head_size = head_size
        self._checksum = PrefixChecksum()
        self.head: list[T] = []
        self.length: int | None = None

    def read(self, count: int) -> list[T]:
        """Return the next items, fewer than `count` at the end of the epoch."""
        with self._random.drawing():
            block = list(islice(self._items, count))
        self.head += block[: self._head_size - len(self.head)]
        self._checksum.update(block)
        if len(block) < count:
            self.length = self._checksum.count
        return block

    def skip(self, count: int, block_size: int = 1024) -> bool:
        """Read past the first `count` items, and return whether there were that many."""
        while count and self.length is None:
            count -= len(self.read(min(count, block_size)))
        return count == 0

    def checksum(self, count: int) -> int:
        """Return a checksum of the first `count` items, which must have been read."""
        return self._checksum.at(count)


class PrefixChecksum:
    """Checksums of every prefix of a sequence, from O(log n) of its items.

    The first 64 items count, and then 32 items of each range from 2**k to 2**(k + 1).
    """

    def __init__(self) -> None:
        self.count = 0
        self._counts = [0]
        self._checksums = [0]

    def update(self, items: Iterable[object]) -> None:
        """Add the next items of the sequence."""
        for item in items:
            if self.count % (1 << max(0, self.count.bit_length() - 6)) == 0:
                self._counts.append(self.count + 1)
                self._checksums.append(zlib.crc32(repr(item).encode(), self._checksums[-1]))
            self.count += 1

    def at(self, count: int) -> int:
        """Return the checksum of the first `count` items."""
        return self._checksums[bisect_right(self._counts, count) - 1]
