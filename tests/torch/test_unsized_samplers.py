"""Samplers without a length: every sample once per epoch, on any number of ranks and resumed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from drawbar import train
from drawbar.torch import enable_reproducibility, prepare_data_loader
from drawbar.torch._attempt_cleanup import attempt_cleanup
from drawbar.torch._order_stream import PrefixChecksum
from drawbar.torch._sampler import EpochSampler
from drawbar.train import RunConfig, TrainingFailedError
from drawbar.train.testing import run_in_threads
from tests.torch.test_data_position import Ids, everything, interrupted, restarted
from tests.train.rank_data_probe import save, saved


class TokenBudgetBatches:
    """Shuffled batches of 1 to 3 samples, as of samples with different numbers of tokens."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(torch.randperm(self.samples).tolist())
        while batch := list(islice(order, random.randint(1, 3))):
            yield batch


class Unsized:
    """The items of another sampler, without its length."""

    def __init__(self, source: Iterable[int]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        yield from self.source


class Endless:
    """Random numbers without end, from one of the global generators."""

    def __init__(self, kind: str) -> None:
        self.draw: Any = {
            "python": lambda: random.randrange(10**9),
            "numpy": lambda: np.random.randint(10**9),
            "torch": lambda: int(torch.randint(10**9, ())),
        }[kind]

    def __iter__(self) -> Iterator[int]:
        return (self.draw() for _ in count())


def samplers(source: Any, world_size: int, **options: Any) -> list[EpochSampler[Any]]:
    options = {"seed": 7, "world_size": world_size, **options}
    return [EpochSampler(source, rank=rank, **options) for rank in range(world_size)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("items", [0, 1, 3, 8, 10, 200])
def test_epoch_sampler_without_length_splits_like_one_with_length(
    items: int, world_size: int, drop_last: bool
) -> None:
    sized = samplers(range(items), world_size, drop_last=drop_last)
    unsized = samplers(Unsized(range(items)), world_size, drop_last=drop_last)
    for _ in range(2):
        assert [list(rank) for rank in unsized] == [list(rank) for rank in sized]


@pytest.mark.parametrize("items", [5, 8, 200])
def test_epoch_sampler_without_length_resumes_on_other_world_size(items: int) -> None:
    for consumed in range(items + 1):
        (first,) = samplers(Unsized(RandomSampler(range(items))), 1)
        order = list(first)
        rest = samplers(Unsized(RandomSampler(range(items))), 3)
        for sampler in rest:
            sampler.resume_from(first.position_after(consumed))
        turns = list(chain(*zip(*(list(sampler) for sampler in rest), strict=True)))
        assert turns == (order[consumed:] + order)[: len(turns)]
        assert 0 <= len(turns) - (items - consumed) < 3


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_endless_sampler_is_not_disturbed_by_draws_of_the_training_loop(kind: str) -> None:
    one, two = (iter(sampler) for sampler in samplers(Endless(kind), 2))
    undisturbed = list(islice(iter(samplers(Endless(kind), 1)[0]), 400))
    turns = []
    for _ in range(200):
        turns += [next(one), next(two)]
        random.random(), np.random.rand(), torch.rand(())
    assert turns == undisturbed


def test_endless_sampler_restores_the_global_generators() -> None:
    states = torch.get_rng_state(), random.getstate()
    next(iter(samplers(Endless("torch"), 2)[0]))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_epoch_sampler_of_batches_over_unsized_sampler_does_not_read_to_the_end() -> None:
    (sampler,) = samplers(BatchSampler(Endless("python"), 4, False), 1)
    assert [len(batch) for batch in islice(sampler, 100)] == [4] * 100
    with pytest.raises(TypeError, match="BatchSampler has no length"):
        len(sampler)


@pytest.mark.parametrize("source", [iter(range(3)), (item for item in range(3)), count()])
def test_epoch_sampler_of_one_time_iterator_raises(source: Any) -> None:
    with pytest.raises(TypeError, match="can be read only once"):
        EpochSampler(source, rank=0, world_size=1, seed=0)


def test_epoch_sampler_resumed_with_other_order_warns_and_starts_the_epoch_again() -> None:
    (first,) = samplers(Unsized(range(100)), 1)
    list(first)
    (second,) = samplers(Unsized([*range(50), *range(99, 49, -1)]), 1)
    for consumed, rest in ((40, 60), (60, 100)):
        second.resume_from(first.position_after(consumed))
        if rest == 60:
            assert len(list(second)) == rest
        else:
            with pytest.warns(UserWarning, match="after 60 items, because it now has fewer items"):
                assert len(list(second)) == rest


def test_prefix_checksum_differs_after_a_changed_item_and_needs_little_memory() -> None:
    one, two = PrefixChecksum(), PrefixChecksum()
    one.update(range(10**5))
    two.update([*range(1024), -1, *range(1025, 10**5)])
    assert one.at(1024) == two.at(1024)
    assert one.at(1025) != two.at(1025)
    assert one.at(10**5) != two.at(10**5)
    assert len(one._counts) < 500


def test_unsized_batch_sampler_on_two_ranks_gives_every_sample(run_config: RunConfig) -> None:
    def function() -> list[list[int]]:
        loader = DataLoader(Ids(20), batch_sampler=TokenBudgetBatches(20), collate_fn=list)
        return list(prepare_data_loader(loader))

    ranks = run_in_threads(function, num_workers=2, run_config=run_config).return_values
    assert len(ranks[0]) == len(ranks[1])
    samples = sorted(chain(*chain(*ranks)))
    assert sorted(set(samples)) == list(range(20))
    assert len(samples) <= 20 + 3  # one batch may be repeated


def test_unsized_batch_sampler_with_reproducibility_pads_the_last_turn(
    run_config: RunConfig,
) -> None:
    class Threes:
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0, 1, 2], [3, 4, 5], [6, 7, 8])

    def function() -> list[list[int]]:
        if train.get_context().get_world_rank() == 0:  # the seed belongs to the process
            enable_reproducibility(1)
        return list(
            prepare_data_loader(DataLoader(Ids(9), batch_sampler=Threes(), collate_fn=list))
        )

    with attempt_cleanup():  # the seed and the deterministic algorithms end with the test
        ranks = run_in_threads(function, num_workers=2, run_config=run_config).return_values
    assert ranks == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [0, 1, 2]]]


@pytest.mark.parametrize(
    ("workers", "num_loader_workers"),
    [((1, 1), 1), ((1, 1), 0), ((2, 2), 0), ((2, 3), 0), ((3, 1), 0)],
)
def test_unsized_batch_sampler_resumed_gives_every_sample_once(
    run_config: RunConfig, workers: tuple[int, int], num_loader_workers: int
) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(
            Ids(),
            batch_sampler=TokenBudgetBatches(1000),
            collate_fn=list,
            num_workers=num_loader_workers,
            multiprocessing_context="fork" if num_loader_workers else None,
        )

    samples = everything(interrupted(loader, run_config, *workers))
    assert sorted(set(samples)) == list(range(1000))
    assert len(samples) <= 1000 + 3 * (workers[1] - 1)


def test_endless_sampler_resumes_in_the_order_of_an_uninterrupted_run(
    run_config: RunConfig,
) -> None:
    class Samples(Ids):
        def __getitem__(self, index: int) -> int:
            return index

    def function() -> list[int]:
        history: list[int] = saved()[0]["history"] if saved() else []
        loader = DataLoader(Samples(), 4, sampler=Endless("torch"), collate_fn=list)
        for batch in prepare_data_loader(loader):
            history += batch
            torch.rand(())
            if len(history) == 40 and not saved():
                save(history=history)
                raise RuntimeError("killed")
            if len(history) >= 100:
                break
        return history

    resumed = restarted(function, run_config)
    (undisturbed,) = samplers(Endless("torch"), 1, seed=torch.initial_seed())
    assert resumed == list(islice(undisturbed, 100))


def test_sampler_that_is_a_generator_raises(run_config: RunConfig) -> None:
    def function() -> None:
        prepare_data_loader(DataLoader(Ids(3), sampler=(index for index in range(3))))

    with pytest.raises(TrainingFailedError, match="sampler is a generator"):
        run_in_threads(function, num_workers=1, run_config=run_config)
