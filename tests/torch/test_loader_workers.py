"""Random numbers in the worker processes of a data loader, over ranks, epochs, and restarts.

Only one rank in threads: a process that is forked while another thread holds a lock may hang.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drawbar import train
from drawbar.torch import prepare_data_loader
from drawbar.train import FailureConfig, Result, RunConfig, collective
from tests.torch.test_data_position import die, restarted
from tests.train.rank_data_probe import save, saved

SAMPLES = 24


class Augmented(Dataset[list[float]]):
    """Each sample is its index and what NumPy and Python draw for it."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> list[float]:
        return [index, float(np.random.rand()), random.random()]


def seed_worker(worker_id: int) -> None:
    """Seed NumPy and Python, as PyTorch's notes on reproducibility recommend."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


class TokenBudgetBatches:
    """Shuffled batches of 1 or 2 samples, without a length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(torch.randperm(self.samples).tolist())
        while batch := list(islice(order, random.randint(1, 2))):
            yield batch


def make_loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    if "batch_sampler" not in options and not isinstance(dataset, IterableDataset):
        options = {"batch_size": 2, "shuffle": True, **options}
    return DataLoader(
        dataset or Augmented(),
        num_workers=1,
        multiprocessing_context="fork",
        worker_init_fn=seed_worker,
        generator=torch.Generator().manual_seed(0),
        collate_fn=list,
        **options,
    )


def run_epochs(
    place: tuple[int, int] | None,
    make: Callable[[], DataLoader[Any]] = make_loader,
    *,
    is_per_epoch: bool = False,
    end: Callable[[], None] = die,
) -> Callable[[], list[Any]]:
    """Return a function of 3 epochs that saves and ends its first attempt at an epoch and step."""

    def function() -> list[Any]:
        before = saved()
        rank = train.get_context().get_world_rank()
        history: list[Any] = before[rank]["history"] if before else []
        loader = prepare_data_loader(make())
        for epoch in range(before[0]["epoch"] if before else 0, 3):
            if is_per_epoch:
                loader = prepare_data_loader(make())
            for step, batch in enumerate(loader):
                history.append([epoch, batch])
                if not before and (epoch, step) == place:
                    save(history=history, epoch=epoch)
                    end()
        return history

    return function


def noise(history: list[Any], *epochs: int) -> list[float]:
    return [sample[1] for epoch, batch in history if epoch in epochs for sample in batch]


@pytest.mark.parametrize("is_per_epoch", [False, True])
def test_loader_with_generator_resumed_repeats_no_augmentation(
    run_config: RunConfig, is_per_epoch: bool
) -> None:
    whole = RunConfig(name="whole", storage_path=run_config.storage_path)
    expected = restarted(run_epochs(None, is_per_epoch=is_per_epoch), whole)
    resumed = restarted(run_epochs((1, 3), is_per_epoch=is_per_epoch), run_config)
    values = noise(resumed, 0, 1, 2)
    assert len(set(values)) == len(values) == 3 * SAMPLES
    assert noise(resumed, 0, 2) == noise(expected, 0, 2)
    assert noise(resumed, 1)[:8] == noise(expected, 1)[:8]


def test_persistent_workers_resumed_repeat_no_augmentation(run_config: RunConfig) -> None:
    whole = RunConfig(name="whole", storage_path=run_config.storage_path)

    def make() -> DataLoader[Any]:
        return make_loader(persistent_workers=True)

    expected = restarted(run_epochs(None, make), whole)
    resumed = restarted(run_epochs((1, 3), make), run_config)
    values = noise(resumed, 0, 1, 2)
    assert len(set(values)) == len(values) == 3 * SAMPLES
    # As documented: PyTorch seeds persistent workers once, so epoch 2 is another one than without
    # the restart.
    assert noise(resumed, 2) != noise(expected, 2)
    samples = [[sample[0] for _, batch in run for sample in batch] for run in (resumed, expected)]
    assert samples[0] == samples[1]


class AugmentedStream(IterableDataset[list[float]]):
    """Samples as they come."""

    def __iter__(self) -> Iterator[list[float]]:
        return (Augmented()[index] for index in range(SAMPLES))


def test_workers_of_iterable_dataset_resumed_are_seeded_by_epoch(run_config: RunConfig) -> None:
    def make() -> DataLoader[Any]:
        return make_loader(AugmentedStream(), batch_size=2)

    whole = RunConfig(name="whole", storage_path=run_config.storage_path)
    expected = restarted(run_epochs(None, make), whole)
    values = noise(expected, 0, 1, 2)
    assert len(set(values)) == len(values) == 3 * SAMPLES
    assert noise(restarted(run_epochs((1, 3), make), run_config), 2) == noise(expected, 2)


@pytest.mark.usefixtures("ray_cluster")
def test_loader_with_generator_augments_differently_on_ranks_and_in_epochs(
    fit: Callable[..., Result],
) -> None:
    def make_stream() -> DataLoader[Any]:
        return make_loader(AugmentedStream(), batch_size=2)

    def function() -> list[list[Any]]:
        return [
            run_epochs(None)(),
            run_epochs(None, is_per_epoch=True)(),
            run_epochs(None, make_stream)(),
        ]

    rank_0, rank_1 = fit(function, num_workers=2).return_values
    for *histories, num_samples in zip(
        rank_0,
        rank_1,
        [SAMPLES, SAMPLES, 2 * SAMPLES],
        strict=True,  # a stream is not split
    ):
        values = [value for history in histories for value in noise(history, 0, 1, 2)]
        assert len(set(values)) == len(values) == 3 * num_samples


def kill_rank_1() -> None:
    if train.get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    collective.barrier()


@pytest.mark.usefixtures("ray_cluster")
def test_killed_worker_with_unsized_sampler_per_epoch_resumes_samples_and_augmentations(
    fit: Callable[..., Result], run_config: RunConfig
) -> None:
    def make() -> DataLoader[Any]:
        return make_loader(batch_sampler=TokenBudgetBatches(SAMPLES))

    function = run_epochs((1, 2), make, is_per_epoch=True, end=kill_rank_1)
    config = replace(run_config, failure_config=FailureConfig(max_failures=1))
    ranks = fit(function, num_workers=2, run_config=config).return_values
    for epoch in range(3):
        batches = [batch for history in ranks for now, batch in history if now == epoch]
        samples = [int(sample[0]) for sample in chain(*batches)]
        assert sorted(set(samples)) == list(range(SAMPLES))
        assert len(samples) <= SAMPLES + 2  # one batch may be repeated
        values = [sample[1] for sample in chain(*batches)]
        assert len(set(values)) == len(values)
    assert len({str(noise(ranks[0], epoch)) for epoch in range(3)}) == 3
