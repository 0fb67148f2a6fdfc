"""One rank's share of what a sampler yields.

The order of an epoch depends on the seed and the epoch alone, not on the number of ranks: it is
what the user's own sampler gives under that seed. The ranks take turns: of the first `world_size`
items each gets one, and so on. So what all ranks together have consumed at any time is the
beginning of one known order, and a `Position` of a few numbers says what is left, for any number of
ranks; to go on from it is to begin the order later, at no cost.
"""

from __future__ import annotations

import threading
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

from drawbar.torch._reproducibility import derive_seed, seeded

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_drawing = threading.Lock()  # random generators belong to the process, ranks may be its threads


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far all ranks together are in an epoch. Holds for any number of ranks.

    Args:
        seed: What the order of every epoch follows from.
        epoch: The epoch.
        consumed: Items that the ranks together have consumed, padding not counted.
        length: Items of the epoch; None before it has begun, or if it has no length.
        check: Checksum of some items of the order: tells whether it is the same order again.
    """

    seed: int
    epoch: int = 0
    consumed: int = 0
    length: int | None = None
    check: int = 0

    def after(self, items: int) -> Position:
        """Give the position so many items further on, at most at the end of the epoch."""
        consumed = self.consumed + items
        return replace(self, consumed=min(consumed, self.length or consumed))


class EpochSampler(Sampler[T_co]):
    """Split a sampler, or a batch sampler, between the ranks; a new order each time it is iterated.

    Whatever randomness the source has (that of PyTorch, NumPy, Python or its own generator), all
    ranks see the same order, since it is drawn under a seed that they share. A source without a
    length is split as it streams; it must then yield the same on every rank by itself.

    Args:
        source: The sampler or batch sampler to split.
        rank: This worker's rank.
        world_size: Number of ranks.
        seed: The same number on every rank.
        drop_last: Whether the ranks get equally many items by leaving the last few out, or by
            repeating the first few.

    Attributes:
        upcoming: Where the next iteration begins.
        current: Where the newest iteration began.
    """

    def __init__(
        self,
        source: Iterable[T_co],
        *,
        rank: int,
        world_size: int,
        seed: int,
        drop_last: bool = False,
    ) -> None:
        self.source = source
        self.rank = rank
        self.num_replicas = world_size
        self.drop_last = drop_last
        self.upcoming = self.current = Position(seed=seed)

    def go_on_from(self, position: Position) -> None:
        """Have the next iteration begin there, in the order that the position's seed gives."""
        self.upcoming = self.current = position

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration goes through; without it, the one after the last.

        The epoch that `go_on_from` is in is gone on with; any other is gone through from its
        beginning.
        """
        if epoch != self.upcoming.epoch:
            self.upcoming = Position(seed=self.upcoming.seed, epoch=epoch)

    def __iter__(self) -> Iterator[T_co]:
        begin = self.upcoming
        # Now and not at the end, which a loop that is left by `break` never comes to.
        self.upcoming = Position(seed=begin.seed, epoch=begin.epoch + 1)
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(begin.epoch)
        if not isinstance(self.source, Sized):
            self.current = begin
            return turns(islice(self.source, begin.consumed, None), self.rank, self.num_replicas)
        seed = derive_seed(begin.seed, begin.epoch)
        with _drawing, own_generators(self.source) as generators, seeded(seed, generators):
            order = list(self.source)
        self.current = self._in_order(begin, order)
        return iter(
            share(
                order,
                self.rank,
                self.num_replicas,
                drop_last=self.drop_last,
                begin=self.current.consumed,
            )
        )

    def _in_order(self, begin: Position, order: Sequence[object]) -> Position:
        """Give where to begin in an order: at its beginning, if it is not the recorded one."""
        found = replace(begin, length=len(order), check=checksum(order))
        if begin.length is None or begin == found:
            return found
        if self.rank == 0:
            warnings.warn(
                f"epoch {begin.epoch} of the data is begun anew: the checkpoint was made when "
                f"{begin.consumed} of its {begin.length} items were consumed, and now it has "
                f"{len(order)} items, or another order. Give the loader the same data and a "
                "sampler whose order follows from PyTorch's, NumPy's or Python's seed, or "
                "prepare_data_loader(..., resume=False)",
                stacklevel=2,
            )
        return replace(found, consumed=0)

    def __len__(self) -> int:
        if not isinstance(self.source, Sized):
            raise TypeError(f"the sampler {type(self.source).__name__} has no length")
        return share_length(len(self.source), self.num_replicas, drop_last=self.drop_last)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not set yet: this object is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.source, name)


def share(
    order: Sequence[T], rank: int, world_size: int, *, drop_last: bool, begin: int = 0
) -> list[T]:
    """Give the items of one rank from `begin` on: each `world_size`-th, equally many for all."""
    length = share_length(len(order) - begin, world_size, drop_last=drop_last)
    items = list(order[begin + rank :: world_size][:length])
    missing = range(len(items), length)
    return items + [order[(begin + rank + turn * world_size) % len(order)] for turn in missing]


def share_length(items: int, world_size: int, *, drop_last: bool) -> int:
    """Say how many items each rank gets."""
    return items // world_size if drop_last else -(-items // world_size)


def turns(items: Iterable[T], rank: int, world_size: int) -> Iterator[T]:
    """Give each `world_size`-th item of a stream, as long as there is one for every rank."""
    for turn in zip(*[iter(items)] * world_size, strict=False):
        yield turn[rank]


def checksum(order: Sequence[object]) -> int:
    """Give a number that tells orders apart, from some 64 items, however many there are."""
    return zlib.crc32(repr(order[:: max(1, len(order) // 64)]).encode())


@contextmanager
def own_generators(source: object) -> Iterator[list[torch.Generator]]:
    """Give the generators that a sampler draws from; one that has none gets one meanwhile.

    So the samplers of PyTorch do not depend on what other threads draw from the process's own.
    """
    samplers = [
        each
        for each in (source, getattr(source, "sampler", None))
        if "generator" in getattr(each, "__dict__", {})
    ]
    without = [each for each in samplers if vars(each)["generator"] is None]
    for each in without:
        vars(each)["generator"] = torch.Generator()
    try:
        generators = (vars(each)["generator"] for each in samplers)
        yield [each for each in generators if isinstance(each, torch.Generator)]
    finally:
        for each in without:
            vars(each)["generator"] = None
