"""Datasets, samplers, and loaders of the soak test."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from benchmarks._soak_scenario import SamplerKind, Scenario

Item = tuple[int, tuple[int, ...]]
EVAL_BATCH_SIZE = 2
TIMEOUT_SECONDS = 60


class Samples(Dataset[Item]):
    """Samples that are their index and three random numbers, drawn in a worker process."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Item:
        if get_worker_info() is None:
            return index, ()
        draws = (int(torch.randint(2**62, ())), np.random.randint(2**62), random.getrandbits(62))
        return index, draws


class _Randomness:
    """Permutations from one of the sources of random numbers that a sampler may use."""

    def __init__(self, scenario: Scenario) -> None:
        self._source = scenario.randomness
        if self._source == "generator":
            self.generator = torch.Generator()

    def permute(self, count: int) -> list[int]:
        """Return the numbers from 0 to `count - 1` in random order."""
        if self._source == "numpy":
            return [int(item) for item in np.random.permutation(count)]
        if self._source == "python":
            return random.sample(range(count), count)
        generator = self.generator if self._source == "generator" else None
        return torch.randperm(count, generator=generator).tolist()


class Shuffled(_Randomness, Sampler[int]):
    """A custom sampler with a length."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._samples = scenario.samples

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        return iter(self.permute(self._samples))


class ShuffledByEpoch(Sampler[int]):
    """A sampler whose order follows from its epoch only."""

    def __init__(self, scenario: Scenario) -> None:
        self._samples = scenario.samples
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._epoch)
        return iter(torch.randperm(self._samples, generator=generator).tolist())


class Unsized(_Randomness, Sampler[int]):
    """A sampler without a length that draws random numbers while it is iterated."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._samples = scenario.samples

    def __iter__(self) -> Iterator[int]:
        remaining = list(range(self._samples))
        while remaining:
            yield remaining.pop(self.permute(len(remaining))[0])


class Endless(_Randomness, Sampler[int]):
    """A sampler without an end."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._samples = scenario.samples

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from self.permute(self._samples)


class TokenBatches(_Randomness, Sampler[list[int]]):
    """A batch sampler without a length: a batch has as many samples as its budget admits."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._samples = scenario.samples
        self._budget = 3 * (scenario.batch_size or 1)
        self.drop_last = scenario.drop_last

    def __iter__(self) -> Iterator[list[int]]:
        batch, tokens = list[int](), 0
        for index in self.permute(self._samples):
            length = 1 + index % 5
            if batch and tokens + length > self._budget:
                yield batch
                batch, tokens = [], 0
            batch.append(index)
            tokens += length
        if batch:
            yield batch


class BatchesByEpoch(BatchSampler):
    """A batch sampler that must be notified of the epoch, although its sampler cannot be."""

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch."""
        generator = torch.Generator().manual_seed(epoch)
        self.sampler = torch.randperm(len(self.sampler), generator=generator).tolist()  # type: ignore[arg-type]


def _batch(
    make_sampler: Callable[[Scenario], Any], make_batches: type[BatchSampler] = BatchSampler
) -> Callable[[Scenario], Sampler[list[int]]]:
    """Return a function that creates a batch sampler over a sampler."""

    def make(scenario: Scenario) -> Sampler[list[int]]:
        size = scenario.batch_size or 1
        return make_batches(make_sampler(scenario), size, scenario.drop_last)

    return make


def _make_shuffled(scenario: Scenario) -> Sampler[int]:
    return RandomSampler(range(scenario.samples))


def _make_weighted(scenario: Scenario) -> Sampler[int]:
    weights = [1.0 + index % 3 for index in range(scenario.samples)]
    return WeightedRandomSampler(weights, scenario.samples)


SAMPLERS: dict[SamplerKind, Callable[[Scenario], Sampler[Any]]] = {
    "shuffled": _make_shuffled,
    "sequential": lambda scenario: SequentialSampler(range(scenario.samples)),
    "weighted": _make_weighted,
    "custom": Shuffled,
    "custom_with_epoch": ShuffledByEpoch,
    "custom_unsized": Unsized,
    "endless": Endless,
    "batches": _batch(_make_shuffled),
    "batches_with_epoch": _batch(lambda scenario: range(scenario.samples), BatchesByEpoch),
    "batches_of_sampler_with_epoch": _batch(ShuffledByEpoch),
    "batches_unsized": TokenBatches,
    "batches_of_unsized": _batch(Unsized),
}


def make_train_loader(scenario: Scenario, seed: int) -> DataLoader[Any]:
    """Create the training loader.

    Args:
        scenario: The scenario.
        seed: Seed of the loader's generator, if it has one.
    """
    if scenario.has_batch_sampler:
        batches = SAMPLERS[scenario.sampler](scenario)
        return _make_loader(scenario, seed, scenario.samples, batch_sampler=batches)
    batch_size, drop_last = scenario.batch_size, scenario.drop_last
    options: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
    if scenario.sampler == "shuffled":
        return _make_loader(scenario, seed, scenario.samples, shuffle=True, **options)
    sampler = SAMPLERS[scenario.sampler](scenario)
    return _make_loader(scenario, seed, scenario.samples, sampler=sampler, **options)


def eval_samples(scenario: Scenario) -> int:
    """Return the size of the evaluation dataset."""
    return 1 + scenario.samples // 3


def make_eval_loader(scenario: Scenario, seed: int) -> DataLoader[Any]:
    """Create the evaluation loader, which shuffles so that its epochs differ."""
    samples = eval_samples(scenario)
    return _make_loader(scenario, seed, samples, batch_size=EVAL_BATCH_SIZE, shuffle=True)


def _make_loader(scenario: Scenario, seed: int, samples: int, **options: Any) -> DataLoader[Any]:
    if scenario.has_generator:
        options["generator"] = torch.Generator().manual_seed(seed)
    if scenario.num_workers:
        options |= {"multiprocessing_context": "fork", "timeout": TIMEOUT_SECONDS}
    collate_fn: Any = list if options.get("batch_size", 1) is not None else _as_batch
    return DataLoader(
        Samples(samples),
        num_workers=scenario.num_workers,
        persistent_workers=scenario.persistent_workers,
        collate_fn=collate_fn,
        **options,
    )


def _as_batch(item: Item) -> list[Item]:
    return [item]
