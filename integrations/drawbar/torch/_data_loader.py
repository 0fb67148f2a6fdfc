"""Data loaders in the training function: split between the ranks, their batches on the worker's
device.

A loader is copied and its sampler exchanged, rather than made anew from a list of settings, so that
every setting it has, and every one that a coming version of PyTorch or a subclass gives it, is
kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from drawbar.torch._apart import meeting_of_our_own
from drawbar.torch._data_position import (
    BatchCounter,
    Counter,
    EpochCounter,
    StateCounter,
    Stateful,
)
from drawbar.torch._devices import get_device
from drawbar.torch._loader_registry import TrackedLoader, get_registry
from drawbar.torch._reproducibility import chosen_seed, derive_seed
from drawbar.torch._sampler import EpochSampler
from drawbar.torch._transfer import moved
from drawbar.train import collective, get_context

T = TypeVar("T")


def prepare_data_loader(
    data_loader: DataLoader[T],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
    *,
    resume: bool = True,
    name: str | None = None,
) -> DataLoader[T]:
    """Split a loader's data between the workers, and put its batches on this worker's device.

    All ranks must call this, for the same loaders in the same order. What comes back is a
    `DataLoader` with all settings of yours, and has the same number of batches on every rank.

    The order of the data is that of your own sampler (shuffled or not, weighted, custom, or a batch
    sampler), split between the ranks: each sample goes to one of them. A few are repeated so that
    all ranks get equally many, or left out if the loader has `drop_last`. Each iteration is a new
    epoch with its own order; `loader.sampler.set_epoch(n)` is honoured but not needed. The order
    follows from the epoch and a seed that rank 0 gives: that of the loader's `generator`, or
    `torch.initial_seed()`; it does not depend on the number of workers.

    Each checkpoint has the position in the data, and an attempt that starts from one goes on after
    the samples that were received when it was reported, on any number of workers, without loading
    what comes before: the first iteration gives the rest of the interrupted epoch. `len()` remains
    that of a whole epoch. See the guide's page on data.

    A sampler that is distributed already is kept as it is, and an `IterableDataset` is left alone:
    split it by `get_context().get_world_rank()` in its `__iter__`. Such loaders have no position,
    but for an `IterableDataset` with `state_dict` and `load_state_dict` and `num_workers=0`, whose
    state, as JSON, is kept. A subclass with an `__iter__` of its own goes on from the beginning of
    the epoch.

    The loader's worker processes are seeded by the seed (of `enable_reproducibility`, or
    `torch.initial_seed()`), the rank and the place in the data, which makes augmentations
    repeatable and different on every rank. Nothing is drawn from PyTorch's own generator: where its
    state is restored with the model, dropout goes on as if nothing had been interrupted. A
    `generator` that the loader has is not replaced.

    Args:
        data_loader: The loader; it is not changed.
        add_dist_sampler: Whether to split the data.
        move_to_device: Whether to move batches to `get_device()`: tensors, also inside dicts,
            lists, tuples, dataclasses and objects with a method `to`.
        auto_transfer: On a GPU, copy the next batch while the model works on this one. Give the
            loader `pin_memory=True`, otherwise the copy has to wait.
        resume: Whether checkpoints have this loader's position.
        name: Tells this loader from others over restarts. Default: its number, in the order of the
            calls; so name the loaders if that order changes.

    Raises:
        TypeError: It is not a `torch.utils.data.DataLoader`.
        RuntimeError: Called outside a training function.
    """
    get_context()  # raises outside a training function
    if isinstance(data_loader, PreparedDataLoader):
        return data_loader
    if not isinstance(data_loader, DataLoader):
        raise TypeError(
            f"prepare_data_loader takes a torch.utils.data.DataLoader, found {data_loader!r} "
            f"({type(data_loader).__name__})"
        )
    loader = copy.copy(data_loader)
    sampler = None
    if add_dist_sampler and not isinstance(loader.dataset, IterableDataset):
        sampler = _split(loader)
    counter = _make_counter(loader, sampler)
    tracked = get_registry().add(counter, name, loader.dataset, is_recorded=resume)
    device = get_device() if move_to_device else torch.device("cpu")
    # A batch that is fetched ahead would be in the dataset's state before it is used.
    ahead = auto_transfer and not isinstance(counter, StateCounter)
    return PreparedDataLoader(
        loader, device, ahead=ahead, tracked=tracked, worker_seed=_replace_generator(loader)
    )


class PreparedDataLoader(DataLoader[T]):
    """A loader that moves its batches to a device and tracks its position.

    All other attributes are those of the loader inside.
    """

    def __init__(
        self,
        loader: DataLoader[T],
        device: torch.device,
        *,
        ahead: bool,
        tracked: TrackedLoader,
        worker_seed: int,
    ) -> None:
        # Without super().__init__(): all settings are those of `loader`.
        self._loader = loader
        self._device = device
        self._ahead = ahead
        self._tracked = tracked
        self._worker_seed = worker_seed

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # a plain iterator over the loader's own
        self._tracked.begin()
        seed = derive_seed(self._worker_seed, *self._tracked.counter.epoch_start)
        self._loader.generator.manual_seed(seed)
        return self._tracked.count(self._batches())

    def _batches(self) -> Iterator[T]:
        if self._device.type == "cpu":  # where the batches are
            return iter(self._loader)
        return moved(self._loader, self._device, ahead=self._ahead)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet: this object is being copied or unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)


def _split(loader: DataLoader[object]) -> EpochSampler[object] | None:
    """Exchange the sampler of a loader, unless it is a distributed one."""
    if _is_distributed(loader.sampler) or _is_distributed(loader.batch_sampler):
        return None
    context = get_context()
    generator = loader.generator
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    if context.get_world_size() > 1:
        with meeting_of_our_own():
            seed = collective.broadcast_from_rank_zero(seed)

    def split(source: Iterable[T], drop_last: bool) -> EpochSampler[T]:
        rank, size = context.get_world_rank(), context.get_world_size()
        return EpochSampler(source, rank=rank, world_size=size, seed=seed, drop_last=drop_last)

    exchanged: dict[str, object]
    sampler: EpochSampler[object]
    batches = loader.batch_sampler
    if batches is not None and loader.batch_size is None:  # the user's own: split by whole batches
        sampler = split(batches, bool(getattr(batches, "drop_last", False)))
        # Also as `sampler`, which PyTorch does not use then, for `loader.sampler.set_epoch()`.
        exchanged = {"batch_sampler": sampler, "sampler": sampler}
    else:
        sampler = items = split(loader.sampler, loader.drop_last)
        exchanged = {"sampler": items}
        if loader.batch_size is not None:
            exchanged["batch_sampler"] = BatchSampler(items, loader.batch_size, loader.drop_last)
    # DataLoader refuses to have these set, since an iterator may be running; this copy has none
    # yet.
    vars(loader).update(exchanged, _iterator=None)
    return sampler


def _make_counter(loader: DataLoader[object], sampler: EpochSampler[object] | None) -> Counter:
    """Return the counter that can count most of a loader: samples, the dataset's state, epochs."""
    if sampler is not None:
        # The batches of a subclass with its own `__iter__` may hold any number of items.
        is_plain = type(loader).__iter__ is DataLoader.__iter__
        return BatchCounter(sampler, (loader.batch_size or 1) if is_plain else 0)
    dataset = loader.dataset
    # Worker processes have copies of the dataset, whose state cannot be read from here.
    is_readable = not loader.num_workers and isinstance(dataset, IterableDataset)
    if is_readable and isinstance(dataset, Stateful):
        return StateCounter(dataset)
    return EpochCounter()


def _replace_generator(loader: DataLoader[object]) -> int:
    """Replace the loader's generator by one that is seeded before each epoch, and return the seed.

    PyTorch seeds the loader's worker processes from that generator, or from the global one. The
    user's generator is the same on every rank, and starts from its seed again after a restart. A
    draw from the global one would change the dropout of a run that resumes inside an epoch.
    """
    if loader.generator is not None:
        seed = loader.generator.initial_seed()
    elif (reproducible_seed := chosen_seed()) is not None:
        seed = reproducible_seed
    else:
        seed = torch.initial_seed()
    loader.generator = torch.Generator()
    return derive_seed(seed, get_context().get_world_rank())


def _is_distributed(sampler: object) -> bool:
    inner = getattr(sampler, "sampler", None)
    return any(
        isinstance(each, DistributedSampler)
        or (hasattr(each, "num_replicas") and hasattr(each, "rank"))
        for each in (sampler, inner)
    )
