"""EpochSampler: shard any sampler in an order that does not depend on the world size.

The order of an epoch depends on the seed and the epoch only: it is the order that the user's
sampler draws with that seed. In each *turn*, every rank takes one item. So the items that all ranks
have consumed are a prefix of one known order. An `EpochPosition` of a few numbers describes that
prefix, and training can resume from it on any number of ranks.
"""

from __future__ import annotations

import inspect
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, TypeVar

from torch.utils.data import Sampler

from drawbar.torch._order_stream import OrderRandom, OrderStream
from drawbar.torch._reproducibility import derive_seed

T_co = TypeVar("T_co", covariant=True)

# Items of an unsized sampler drawn at once. Each draw replaces the random state of the process,
# which takes about 0.3 ms.
_MAX_BLOCK_SIZE = 1024


@dataclass(frozen=True, kw_only=True)
class EpochPosition:
    """Progress of all ranks together in an epoch, valid for any world size.

    Args:
        seed: Seed from which the order of every epoch is derived.
        epoch: The epoch, from 0.
        consumed: Items that all ranks together have consumed, without padding.
        length: Items of the epoch; None before it has begun, or if the sampler has no length.
        check: Checksum with which a resumed run verifies that the order is the same.
        is_rollback: Whether a rollback has left out the epochs between a checkpoint and this one.

    Example:
        >>> EpochPosition(seed=0, consumed=8).advance(4).consumed
        12
    """

    seed: int
    epoch: int = 0
    consumed: int = 0
    length: int | None = None
    check: int = 0
    is_rollback: bool = False

    def advance(self, items: int) -> EpochPosition:
        """Return the position after more items, at most at the end of the epoch."""
        consumed = self.consumed + items
        return replace(self, consumed=min(consumed, self.length or consumed))


class EpochSampler(Sampler[T_co]):
    """Split a sampler or batch sampler between the ranks, with a new order in each epoch.

    All ranks draw the same order, because they share the seed under which the source draws. The
    source may use the global generators of PyTorch, NumPy, or Python, or its attribute `generator`.

    A source with a length is drawn at the beginning of the epoch. A source without a length is read
    in blocks of up to 1024 items, so it may be infinite.

    Args:
        source: The sampler or batch sampler. Each `iter(source)` must begin a new epoch.
        rank: Rank of this worker.
        world_size: Number of ranks.
        seed: The same number on every rank.
        drop_last: Whether an incomplete last turn is dropped. By default it is padded with the
            first items of the epoch.

    Attributes:
        next_position: Position at which the next iteration begins.
        current_position: Position at which the newest iteration began.
        is_left_out: Whether the next iteration is of an epoch that a rollback has left out.

    Raises:
        TypeError: The source is a generator or another iterator that can be read only once.

    Example:
        >>> sampler = EpochSampler(range(6), rank=1, world_size=2, seed=0)
        >>> list(sampler)
        [1, 3, 5]
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
        # Classes with an `__iter__` method may begin a new epoch in it although they return self.
        is_iterator = isinstance(source, Iterator)
        if is_iterator and not inspect.isfunction(getattr(type(source), "__iter__", None)):
            raise TypeError(
                f"The sampler is a {type(source).__name__}, which can be read only once. Pass an "
                "object whose __iter__ returns a new iterator for each epoch."
            )
        self.source = source
        self.rank = rank
        self.num_replicas = world_size
        self.drop_last = drop_last
        self.next_position = self.current_position = EpochPosition(seed=seed)
        self.is_left_out = False
        self._requested_epoch: int | None = None
        self._stream: OrderStream[T_co] | None = None  # of the newest iteration
        self._share: Sequence[T_co] = ()  # items of this rank in the newest iteration

    def get_items(self, first: int, count: int) -> Sequence[T_co]:
        """Return items of this rank in the newest iteration; none of a source without a length."""
        return self._share[first : first + count]

    def resume_from(self, position: EpochPosition) -> None:
        """Begin the next iteration at a position, in the order of that position's seed.

        An epoch that `set_epoch` has requested before takes precedence.
        """
        self.next_position = self.current_position = position
        if self._requested_epoch is not None:
            self.set_epoch(self._requested_epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; the default is the one after the previous epoch.

        If the next iteration would resume inside this epoch, it still does. The iteration of an
        epoch that a rollback has left out has no items.
        """
        self._requested_epoch = epoch
        self.is_left_out = self.next_position.is_rollback and epoch < self.next_position.epoch
        if self.is_left_out:
            return
        if epoch != self.next_position.epoch:
            self.next_position = EpochPosition(seed=self.next_position.seed, epoch=epoch)

    def position_after(self, items: int) -> EpochPosition:
        """Return the position after a number of items of the newest iteration, of all ranks.

        Only items that this rank has already taken from the sampler, or padding, may be counted.
        """
        position = self.current_position.advance(items)
        if self._stream is None:
            return position
        consumed = min(position.consumed, self._stream.length or position.consumed)
        return replace(position, consumed=consumed, check=self._stream.checksum(consumed))

    def __iter__(self) -> Iterator[T_co]:
        # A generator does nothing before its first item. This matters because DataLoader calls
        # `iter` twice if it has worker processes.
        yield from self._begin_epoch()

    def _begin_epoch(self) -> Iterator[T_co]:
        begin = self.next_position
        self._share = ()
        if self.is_left_out:
            self.is_left_out, self._requested_epoch, self._stream = False, None, None
            return iter(())
        begin = replace(begin, is_rollback=False)
        # Set this now: a loop that ends with `break` never reaches the end of the epoch.
        self.next_position = EpochPosition(seed=begin.seed, epoch=begin.epoch + 1)
        self._requested_epoch = None
        for sampler in (getattr(self.source, "sampler", None), self.source):
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(begin.epoch)
        if get_length(self.source) is None:
            return self._iterate_stream(begin)
        self._stream = None
        with OrderRandom(self.source, derive_seed(begin.seed, begin.epoch)).drawing():
            order = list(self.source)
        self.current_position = self._locate(begin, order)
        self._share = self._take_share(order[self.current_position.consumed :], padding=order)
        return iter(self._share)

    def _locate(self, begin: EpochPosition, order: Sequence[object]) -> EpochPosition:
        """Return the position to begin at: the start of the order if it is not the recorded one."""
        position = replace(begin, length=len(order), check=order_checksum(order))
        if begin.length is None or begin == position:
            return position
        difference = "its items are now in another order"
        if len(order) != begin.length:
            difference = f"it now has {len(order)} items"
        self._warn_of_other_order(begin, difference)
        return replace(position, consumed=0)

    def _iterate_stream(self, begin: EpochPosition) -> Iterator[T_co]:
        stream = self._open_stream(begin)
        is_same = stream.skip(begin.consumed) and stream.checksum(begin.consumed) == begin.check
        if begin.consumed and not is_same:
            self._warn_of_other_order(begin, "it now has fewer items, or they are in another order")
            begin = replace(begin, consumed=0)
            stream = self._open_stream(begin)
        self.current_position = replace(begin, length=None, check=0)
        self._stream = stream
        return self._share_stream(stream)

    def _open_stream(self, begin: EpochPosition) -> OrderStream[T_co]:
        seed = derive_seed(begin.seed, begin.epoch)
        return OrderStream(self.source, seed, head_size=self.num_replicas)

    def _share_stream(self, stream: OrderStream[T_co]) -> Iterator[T_co]:
        world_size = self.num_replicas
        num_turns = 1
        while block := stream.read(num_turns * world_size):
            num_turns = max(1, min(2 * num_turns, _MAX_BLOCK_SIZE // world_size))
            yield from self._take_share(block, padding=stream.head)

    def _take_share(self, items: Sequence[T_co], padding: Sequence[T_co]) -> Sequence[T_co]:
        """Return this rank's items. All ranks get the same number of items.

        Args:
            items: Items of all ranks. Only at the end of the epoch, the last turn is incomplete.
            padding: The first items of the epoch, which complete the last turn.
        """
        if num_extra := len(items) % self.num_replicas:
            missing = islice(cycle(padding), self.num_replicas - num_extra)
            items = items[:-num_extra] if self.drop_last else [*items, *missing]
        return items[self.rank :: self.num_replicas]

    def _warn_of_other_order(self, begin: EpochPosition, difference: str) -> None:
        if self.rank != 0:
            return
        items = "" if begin.length is None else f" of its {begin.length}"
        warnings.warn(
            f"Epoch {begin.epoch} of the data starts from its beginning. It cannot resume after "
            f"{begin.consumed}{items} items, because {difference}. Use the same data. A custom "
            "sampler must draw from the generators of PyTorch, NumPy, or Python. If this is the "
            "position of another loader, pass prepare_data_loader(..., name=) for both.",
            stacklevel=3,
        )

    def __len__(self) -> int:
        length = get_length(self.source)
        if length is None:
            raise TypeError(f"The sampler {type(self.source).__name__} has no length.")
        return num_rank_items(length, self.num_replicas, drop_last=self.drop_last)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not set yet: this object is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.source, name)


def get_length(source: object) -> int | None:
    """Return the length of a sampler, or None if it has none.

    PyTorch's `BatchSampler` has `__len__`, which raises if its own sampler has no length.
    """
    try:
        return len(source)  # type: ignore[arg-type]  # TypeError is handled
    except (TypeError, NotImplementedError):
        return None


def num_rank_items(items: int, world_size: int, *, drop_last: bool) -> int:
    """Return the number of items of each rank.

    Args:
        items: Number of items of all ranks.
        world_size: Number of ranks.
        drop_last: Whether an incomplete last turn is dropped. Otherwise it is padded.

    Returns:
        The number of items, the same for all ranks.

    Example:
        >>> num_rank_items(10, 4, drop_last=False)
        3
    """
    return items // world_size if drop_last else -(-items // world_size)


def order_checksum(order: Sequence[object]) -> int:
    """Return a checksum of an order, from at most 128 of its items."""
    return zlib.crc32(repr(order[:: max(1, len(order) // 64)]).encode())
