"""Samplers without a length: every sample once per epoch, on any number of ranks and resumed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from drawbar.torch import prepare_data_loader
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


def test_unsized_batch_sampler_on_two_ranks_gives_every_sample(run_config: RunConfig) -> None:
    def function() -> list[list[int]]:
        loader = DataLoader(Ids(20), batch_sampler=TokenBudgetBatches(20), collate_fn=list)
        return list(prepare_data_loader(loader))

    ranks = run_in_threads(function, num_workers=2, run_config=run_config).return_values
    assert len(ranks[0]) == len(ranks[1])
    samples = sorted(chain(*chain(*ranks)))
    assert sorted(set(samples)) == list(range(20))
    assert len(samples) <= 20 + 3  # one batch may be repeated


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
    run_config: RunConfig, tmp_path: Path
) -> None:
    def draw(*, is_killed: bool) -> list[int]:
        history: list[int] = saved()[0]["history"] if saved() else []
        loader = DataLoader(Ids(), 4, sampler=Endless("torch"), collate_fn=list)
        for batch in prepare_data_loader(loader):
            history += batch
            torch.rand(())
            if is_killed and len(history) == 40 and not saved():
                save(history=history)
                raise RuntimeError("killed")
            if len(history) >= 100:
                break
        return history

    whole = RunConfig(name="whole", storage_path=tmp_path)
    expected = restarted(partial(draw, is_killed=False), whole)
    assert len(expected) == 100
    assert restarted(partial(draw, is_killed=True), run_config) == expected


def test_sampler_that_is_a_generator_raises(run_config: RunConfig) -> None:
    def function() -> None:
        prepare_data_loader(DataLoader(Ids(3), sampler=(index for index in range(3))))

    with pytest.raises(TrainingFailedError, match="sampler is a generator"):
        run_in_threads(function, num_workers=1, run_config=run_config)
