"""prepare_data_loader: shard a data loader and move its batches to the device.

The loader is copied and its sampler is replaced. A new loader created from a list of settings would
lose the settings of subclasses and later PyTorch versions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from drawbar.torch._communication_check import exclude_from_communication_check
from drawbar.torch._data_position import (
    DatasetStateTracker,
    EpochCounter,
    PositionTracker,
    SamplerPositionTracker,
    StatefulDataset,
)
from drawbar.torch._device_transfer import iter_to_device
from drawbar.torch._devices import get_device
from drawbar.torch._in_place import InPlaceTraining, find_training
from drawbar.torch._loader_registry import LoaderRegistry, TrackedLoader
from drawbar.torch._reproducibility import current_seed, derive_seed
from drawbar.torch._sampler import EpochSampler
from drawbar.torch._stateful_loader import is_stateful_loader, reject_state
from drawbar.torch._stream_position import StreamTracker, is_huggingface_stream
from drawbar.torch._training_state import LoaderRecord
from drawbar.train import collective, get_context
from drawbar.train.backend import attempt_local, measure_data_wait

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
    """Shard a data loader across the workers and move its batches to the device.

    All ranks must call this for the same loaders in the same order. All ranks get the same number
    of batches.

    Your sampler defines the order of the samples. It may be a batch sampler, have no length, or be
    infinite. Each sample is assigned to one rank. If the samples cannot be divided equally, the
    first samples are repeated at the end of the epoch. If the loader has `drop_last`, the last
    samples are dropped instead.

    Each iteration is a new epoch with a new order. `loader.sampler.set_epoch(n)` works, but is not
    needed. The order is derived from the epoch and a seed of rank 0: the seed of the loader's
    `generator`, or `torch.initial_seed()`. It does not depend on the number of workers.

    Each checkpoint contains the position in the data: the samples that the training function has
    received when it reports the checkpoint. After a restart, the first iteration yields the
    remainder of the interrupted epoch, on any number of workers, without loading earlier samples.
    `len()` remains the length of a complete epoch. If the training function prepares a new loader
    for each epoch, the new loader continues with the next epoch. See the guide's page on data.

    Some loaders are not split, or repeat an interrupted epoch from its start:

    - A loader with a distributed sampler keeps this sampler, whose `set_epoch` you must call. It
      repeats the epoch.
    - An `IterableDataset` is not split: use `get_context().get_world_rank()` in its `__iter__`. It
      repeats the epoch. However, if it has `state_dict` and `load_state_dict`, and the loader has
      `num_workers=0`, its state is saved as JSON and it resumes within the epoch. A stream of
      Hugging Face `datasets` always resumes within the epoch.
    - A subclass of `DataLoader` with its own `__iter__` is split, but repeats the epoch. A
      `StatefulDataLoader` of torchdata resumes within the epoch: with an `IterableDataset`, by its
      own state, on the same number of workers.

    The loader's worker processes get different seeds on each rank and in each epoch, so that
    augmentations differ. These seeds are derived from the seed of the loader's `generator`. Without
    a `generator`, the seed of `enable_reproducibility` or `torch.initial_seed()` is used. Nothing
    is drawn from PyTorch's global generator.

    Args:
        data_loader: Data loader to prepare. It is not changed.
        add_dist_sampler: Whether to split the data.
        move_to_device: Whether to move batches to `get_device()`: tensors, also inside dicts,
            lists, tuples, dataclasses, and objects with a method `to`.
        auto_transfer: On a GPU, copy the next batch while the model processes the current one.
            This needs a loader with `pin_memory=True`. Without it, the copy has to wait.
        resume: Whether checkpoints contain this loader's position.
        name: Identifies the loader after a restart. By default, it is identified by the line that
            prepares it, and the type and length of its dataset. If several loaders have the same
            name, for example one per epoch, each continues with the epoch after the previous one.

    Returns:
        A `DataLoader` with the attributes of the original, except for samplers and `generator`.

    Raises:
        TypeError: `data_loader` is not a `torch.utils.data.DataLoader`, or its sampler is a
            generator object.
        RuntimeError: Called outside a training function.

    Example:
        >>> loader = prepare_data_loader(DataLoader(dataset, batch_size=64, shuffle=True))
        >>> for epoch in range(start_epoch, 3):
        ...     for batch in loader:
        ...         loss = train_step(batch)
    """
    get_context()  # raises outside a training function
    if isinstance(data_loader, PreparedDataLoader):
        return data_loader
    if not isinstance(data_loader, DataLoader):
        raise TypeError(
            f"prepare_data_loader needs a torch.utils.data.DataLoader, found {data_loader!r} "
            f"({type(data_loader).__name__})."
        )
    loader = copy.copy(data_loader)
    sampler = None
    if add_dist_sampler and not isinstance(loader.dataset, IterableDataset):
        sampler = _replace_sampler(loader)
    if sampler is not None and resume and is_stateful_loader(loader):
        reject_state(loader)
    tracker = _make_tracker(loader, sampler)
    registry = attempt_local(LoaderRegistry)
    tracked = registry.add(tracker, name, loader.dataset, is_recorded=resume)
    device = get_device() if move_to_device else torch.device("cpu")
    # With prefetching, the dataset's state would include a batch before it is used.
    prefetch = auto_transfer and not isinstance(tracker, DatasetStateTracker | StreamTracker)
    prepared = PreparedDataLoader(
        loader, device, prefetch=prefetch, tracked=tracked, worker_seed=_replace_generator(loader)
    )
    if (training := find_training()) is not None:
        prepared.recover_in_place(training)
    return prepared


class PreparedDataLoader(DataLoader[T]):
    """Data loader that moves its batches to a device and tracks its position.

    All other attributes are those of the inner loader.
    """

    def __init__(
        self,
        loader: DataLoader[T],
        device: torch.device,
        *,
        prefetch: bool,
        tracked: TrackedLoader,
        worker_seed: int,
    ) -> None:
        # Without super().__init__(): all settings belong to `loader`.
        self._loader = loader
        self._device = device
        self._prefetch = prefetch
        self._tracked = tracked
        self._worker_seed = worker_seed
        self._training: tuple[InPlaceTraining, LoaderRecord] | None = None

    def recover_in_place(self, training: InPlaceTraining) -> None:
        """Yield only batches that a dead process of this rank has not consumed."""
        self._training = training, training.add_loader(self._tracked)

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # wraps the loader's iterator
        if self._training is None:
            return self._start()
        training, record = self._training
        return training.iterate(record, self._start)

    def _start(self, position: object = None) -> Iterator[T]:
        """Begin an iteration, at another position than the next one if it is not None."""
        self._tracked.begin(position)
        tracker = self._tracked.tracker
        seed = derive_seed(self._worker_seed, *tracker.epoch_start)
        self._loader.generator.manual_seed(seed)
        return tracker.track(measure_data_wait(self._batches()))

    def _batches(self) -> Iterator[T]:
        if self._device.type == "cpu":  # batches are already there
            return iter(self._loader)
        return iter_to_device(self._loader, self._device, prefetch=self._prefetch)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet: this object is being copied or unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)


def _replace_sampler(loader: DataLoader[object]) -> EpochSampler[object] | None:
    """Replace the sampler of a loader with one for this rank, unless it is distributed."""
    if _is_distributed(loader.sampler) or _is_distributed(loader.batch_sampler):
        return None
    context = get_context()
    generator = loader.generator
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    if context.get_world_size() > 1:
        with exclude_from_communication_check():
            seed = collective.broadcast_from_rank_zero(seed)

    def make_sampler(source: Iterable[T], drop_last: bool) -> EpochSampler[T]:
        rank, size = context.get_world_rank(), context.get_world_size()
        return EpochSampler(source, rank=rank, world_size=size, seed=seed, drop_last=drop_last)

    replacements: dict[str, object]
    sampler: EpochSampler[object]
    batches = loader.batch_sampler
    if batches is not None and loader.batch_size is None:  # custom batch sampler
        sampler = make_sampler(batches, bool(getattr(batches, "drop_last", False)))
        # Also set `sampler`, which PyTorch ignores here, for `loader.sampler.set_epoch()`.
        replacements = {"batch_sampler": sampler, "sampler": sampler}
    else:
        sampler = items = make_sampler(loader.sampler, loader.drop_last)
        replacements = {"sampler": items}
        if loader.batch_size is not None:
            replacements["batch_sampler"] = BatchSampler(items, loader.batch_size, loader.drop_last)
    # DataLoader does not allow setting these attributes, because an iterator may be running. This
    # copy has no iterator yet.
    vars(loader).update(replacements, _iterator=None)
    return sampler


def _make_tracker(
    loader: DataLoader[object], sampler: EpochSampler[object] | None
) -> PositionTracker:
    """Return the most precise tracker for a loader: by samples, dataset state, or epochs."""
    if sampler is not None:
        # The batches of a subclass with its own `__iter__` may hold any number of items.
        items = (loader.batch_size or 1) if _iterates_as_usual(loader) else 0
        return SamplerPositionTracker(sampler, items)
    dataset = loader.dataset
    # Worker processes have copies of the dataset, whose state cannot be read from here.
    is_readable = not loader.num_workers and isinstance(dataset, IterableDataset)
    if is_huggingface_stream(dataset) and _iterates_as_usual(loader):
        world_size = get_context().get_world_size()
        batch_size = (loader.batch_size or 1) * world_size
        return StreamTracker(dataset, batch_size, world_size, reads_state=is_readable)
    if is_stateful_loader(loader):
        return DatasetStateTracker(cast("StatefulDataset", loader))
    if is_readable and isinstance(dataset, StatefulDataset):
        return DatasetStateTracker(dataset)
    return EpochCounter()


def _iterates_as_usual(loader: DataLoader[object]) -> bool:
    return is_stateful_loader(loader) or type(loader).__iter__ is DataLoader.__iter__


def _replace_generator(loader: DataLoader[object]) -> int:
    """Replace the loader's generator with one that is seeded before each epoch. Return the seed.

    PyTorch seeds the loader's worker processes from this generator, or from the global one. The
    user's generator is the same on every rank, and starts from its seed again after a restart.
    Drawing from the global one would change the dropout of a run that resumes inside an epoch.
    """
    if loader.generator is not None:
        seed = loader.generator.initial_seed()
    elif (reproducible_seed := current_seed()) is not None:
        seed = reproducible_seed
    else:
        seed = torch.initial_seed()
    loader.generator = torch.Generator()
    return derive_seed(seed, get_context().get_world_rank())


def _is_distributed(sampler: object) -> bool:
    inner = getattr(sampler, "sampler", None)
    return any(
        isinstance(candidate, DistributedSampler)
        or (hasattr(candidate, "num_replicas") and hasattr(candidate, "rank"))
        for candidate in (sampler, inner)
    )
