"""Tests of drawbar.torch._sampler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, WeightedRandomSampler

from drawbar.torch._sampler import EpochSampler, rank_items


def samplers(source: Any, world_size: int, **options: Any) -> list[EpochSampler[Any]]:
    options = {"seed": 7, "world_size": world_size, **options}
    return [EpochSampler(source, rank=rank, **options) for rank in range(world_size)]


def test_epoch_sampler_assigns_items_round_robin() -> None:
    assert rank_items("abcdef", 0, 2, drop_last=False) == ["a", "c", "e"]
    assert rank_items("abcdef", 1, 2, drop_last=False) == ["b", "d", "f"]


@pytest.mark.parametrize("items", [0, 1, 3, 8, 10])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_rank_items_are_equal_and_complete(items: int, world_size: int) -> None:
    shares = [rank_items(range(items), r, world_size, drop_last=False) for r in range(world_size)]
    assert len({len(each) for each in shares}) == 1
    assert {item for each in shares for item in each} == set(range(items))
    assert sum(map(len, shares)) - items < world_size


def test_rank_items_with_drop_last_repeats_nothing() -> None:
    shares = [rank_items(range(10), rank, 3, drop_last=True) for rank in range(3)]
    assert sorted(item for each in shares for item in each) == list(range(9))


def test_epoch_sampler_order_differs_by_epoch() -> None:
    ranks = samplers(RandomSampler(range(12)), 3)
    epochs = [[list(each) for each in ranks] for _ in range(3)]
    for epoch in epochs:
        assert sorted(item for each in epoch for item in each) == list(range(12))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_epoch_sampler_order_is_independent_of_world_size() -> None:
    (alone,) = samplers(RandomSampler(range(12)), 1)
    together = [list(each) for each in samplers(RandomSampler(range(12)), 3)]
    assert list(alone) == [item for turn in zip(*together, strict=True) for item in turn]


def test_epoch_sampler_set_epoch_sets_order() -> None:
    first, second = samplers(RandomSampler(range(12)), 1) + samplers(RandomSampler(range(12)), 1)
    epochs = [list(first) for _ in range(3)]
    second.set_epoch(2)
    assert list(second) == epochs[2]
    assert list(second) == list(first)


def test_epoch_sampler_order_differs_by_seed() -> None:
    (one,) = samplers(RandomSampler(range(12)), 1, seed=1)
    (two,) = samplers(RandomSampler(range(12)), 1, seed=2)
    assert list(one) != list(two)


def test_epoch_sampler_does_not_change_generators() -> None:
    generator = torch.Generator()
    generator.manual_seed(3)
    (sampler,) = samplers(RandomSampler(range(12), generator=generator), 1)
    states = [generator.get_state(), torch.get_rng_state()]
    python_state = random.getstate()
    list(sampler)
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    assert random.getstate() == python_state


class PythonShuffle(Sampler[int]):
    """A custom sampler that draws from Python's own generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(10), 10))

    def __len__(self) -> int:
        return 10


def test_epoch_sampler_splits_custom_sampler() -> None:
    one, two = (list(each) for each in samplers(PythonShuffle(), 2))
    assert sorted(one + two) == list(range(10))


def test_epoch_sampler_keeps_weights_of_weighted_sampler() -> None:
    weights = [0.0] * 5 + [1.0] * 5
    one, two = (list(each) for each in samplers(WeightedRandomSampler(weights, 40), 2))
    assert len(one) == len(two) == 20
    assert set(one + two) == set(range(5, 10))


def test_epoch_sampler_splits_batch_sampler_by_batches() -> None:
    batches = BatchSampler(RandomSampler(range(10)), 3, drop_last=False)
    one, two = (list(each) for each in samplers(batches, 2))
    assert len(one) == len(two) == len(samplers(batches, 2)[0]) == 2
    assert {item for batch in one + two for item in batch} == set(range(10))
    assert samplers(batches, 2)[0].batch_size == 3


class RecordsEpochs(RandomSampler):
    """A sampler that is called with the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epochs = [*getattr(self, "epochs", []), epoch]


def test_epoch_sampler_sets_epoch_of_inner_sampler() -> None:
    inner = RecordsEpochs(range(12))
    (sampler,) = samplers(BatchSampler(inner, 3, drop_last=False), 1)
    sampler.set_epoch(4)
    list(sampler)
    list(sampler)
    assert inner.epochs == [4, 5]
