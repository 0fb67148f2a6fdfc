"""Tests of data positions: resuming inside an epoch, also on another number of workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from drawbar import train
from drawbar.torch import prepare_data_loader
from drawbar.train import FailureConfig, Result, RunConfig, TrainingFailedError, collective
from drawbar.train.testing import run_in_threads
from tests.train.rank_data_probe import save, saved

SAMPLES = 1000


class Ids(Dataset[int]):
    """The samples are their own indices; counts how many were loaded in this process."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count
        self.loaded = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.loaded += 1
        return index


def die() -> None:
    """End the attempt, on rank 0; the others wait for that."""
    if train.get_context().get_world_rank() == 0:
        raise RuntimeError("killed")
    collective.barrier()


def kill() -> None:
    """Kill rank 1; the others wait for that."""
    if train.get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    collective.barrier()


def walk(
    loader: Callable[[], DataLoader[Any]],
    save_at: int = 0,
    die_at: int | None = None,
    end: Callable[[], None] = die,
) -> Callable[[], list[list[int]]]:
    """A function that goes through one epoch; gives the ids seen before the checkpoint and after.

    Saves at one batch, and at a later one ends its first attempt.
    """

    def function() -> list[list[int]]:
        before, now = [rank["seen"] for rank in saved()], list[int]()
        for step, batch in enumerate(prepare_data_loader(loader()), 1):
            now += map(int, chain(*batch) if isinstance(batch[0], list) else batch)
            if step == save_at and not before:
                save(seen=now)
            if step == die_at and train.get_context().get_attempt() == 0:
                end()
        return [*before, now]

    return function


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Ids(), 10, shuffle=True, collate_fn=list, **options)


def interrupted(loader: Callable[[], DataLoader[Any]], config: RunConfig, *workers: int) -> Result:
    """Run that dies after 23 batches, was saved after 16, and is resumed by other workers."""
    first, second = workers
    with pytest.raises(TrainingFailedError, match="killed"):
        run_in_threads(walk(loader, 16, 23), num_workers=first, run_config=config)
    return run_in_threads(walk(loader), num_workers=second, run_config=config)


def restarted(function: Callable[[], Any], config: RunConfig) -> Any:
    """Run a function that dies once on one worker, and return its result after the restart."""
    config = replace(config, failure_config=FailureConfig(max_failures=1))
    return run_in_threads(function, num_workers=1, run_config=config).return_value


def everything(result: Result) -> list[int]:
    """Ids that the first ranks saw before the checkpoint, and the resumed ranks after it."""
    ranks = result.return_values
    return sorted(chain(*ranks[0][:-1], *(rank[-1] for rank in ranks)))


@pytest.mark.parametrize("workers", [(2, 2), (2, 4), (4, 2), (1, 3), (3, 1)])
def test_data_loader_resume_yields_each_sample_once(
    run_config: RunConfig, workers: tuple[int, int]
) -> None:
    assert everything(interrupted(shuffled, run_config, *workers)) == list(range(SAMPLES))


def test_data_loader_resume_has_order_of_uninterrupted_run(
    run_config: RunConfig, tmp_path: Path
) -> None:
    whole = run_in_threads(
        walk(shuffled), run_config=RunConfig(name="whole", storage_path=tmp_path)
    )
    result = interrupted(shuffled, run_config, 2, 2)
    orders = [rank[index] + rank[-1] for index, rank in enumerate(result.return_values)]
    assert orders == [rank[-1] for rank in whole.return_values]


def test_data_loader_resume_keeps_prefetched_batches(run_config: RunConfig) -> None:
    def loader() -> DataLoader[Any]:
        return shuffled(num_workers=1, prefetch_factor=4, multiprocessing_context="fork")

    assert everything(interrupted(loader, run_config, 1, 1)) == list(range(SAMPLES))


def test_batch_sampler_resume_yields_complete_batches(run_config: RunConfig) -> None:
    def loader() -> DataLoader[Any]:
        batches = BatchSampler(RandomSampler(range(SAMPLES)), 10, drop_last=False)
        return DataLoader(Ids(), batch_sampler=batches, collate_fn=list)

    assert everything(interrupted(loader, run_config, 2, 4)) == list(range(SAMPLES))


def test_data_loader_resume_repeats_only_padding(run_config: RunConfig) -> None:
    seen = everything(interrupted(shuffled, run_config, 2, 3))  # 680 samples are left for 3
    assert sorted(set(seen)) == list(range(SAMPLES))
    assert len(seen) == SAMPLES + 1


@pytest.mark.parametrize("workers", [(4, 3), (3, 4), (2, 3), (1, 4)])
def test_drop_last_resumed_on_other_world_size_drops_less_than_one_batch_per_worker(
    run_config: RunConfig, workers: tuple[int, int]
) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Ids(), 7, shuffle=True, drop_last=True, collate_fn=list)

    result = interrupted(loader, run_config, *workers)
    samples = everything(result)
    dropped = (SAMPLES - 16 * 7 * workers[0]) % (7 * workers[1])
    assert len(samples) == len(set(samples)) == SAMPLES - dropped
    assert len({len(rank[-1]) for rank in result.return_values}) == 1


@pytest.mark.parametrize("save_at", [2, 80])
def test_data_loader_resume_does_not_load_consumed_samples(
    run_config: RunConfig, save_at: int
) -> None:
    def function() -> int:
        dataset = Ids()
        loader = prepare_data_loader(DataLoader(dataset, 10, collate_fn=list))
        for step, _ in enumerate(loader, 1):
            if step == save_at and not saved():
                save()
                die()
        return dataset.loaded

    assert restarted(function, run_config) == SAMPLES - 10 * save_at


def epochs(
    save_when: Callable[[int, int], bool], *, set_epoch: bool = False
) -> Callable[[], list[Any]]:
    """A function of three epochs of two batches, that ends its first attempt where it saves.

    `save_when(epoch, step)`; step 2 is after the loop over the batches.
    """

    def function() -> list[Any]:
        before = saved()
        history = before[0]["history"] if before else []
        loader = prepare_data_loader(DataLoader(Ids(6), 3, shuffle=True, collate_fn=list))

        def save_and_die(epoch: int, step: int, start: int) -> None:
            if save_when(epoch, step) and not before:
                save(history=history, start=start)
                die()

        for epoch in range(before[0]["start"] if before else 0, 3):
            if set_epoch:
                loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for step, batch in enumerate(loader):
                history.append(batch)
                save_and_die(epoch, step, epoch)
            save_and_die(epoch, 2, epoch + 1)
        return history

    return function


@pytest.mark.parametrize("set_epoch", [False, True])
@pytest.mark.parametrize("place", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 2)])
def test_data_loader_resume_continues_epoch_number(
    run_config: RunConfig, tmp_path: Path, place: tuple[int, int], set_epoch: bool
) -> None:
    def here(*now: int) -> bool:
        return now == place

    whole = epochs(lambda *_: False, set_epoch=set_epoch)
    function = epochs(here, set_epoch=set_epoch)
    expected = restarted(whole, RunConfig(name="whole", storage_path=tmp_path))
    assert restarted(function, run_config) == expected


class Stream(IterableDataset[int]):
    """Numbers from 0 to 99; knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 100:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_stateful_dataset_resumes_from_its_state(run_config: RunConfig) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Stream(), 4, collate_fn=list)

    assert everything(interrupted(loader, run_config, 1, 1)) == list(range(100))


class Doubled(DataLoader[Any]):
    """Loader that yields every batch twice."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield from (batch, batch)


def test_loader_with_custom_iter_restarts_epoch(run_config: RunConfig) -> None:
    def loader() -> DataLoader[Any]:
        return Doubled(Ids(), 10, collate_fn=list)

    before, now = interrupted(loader, run_config, 1, 1).return_value
    assert len(before) == 160
    assert sorted(now) == sorted([*range(SAMPLES)] * 2)


def test_data_loader_resume_with_other_data_restarts_epoch(run_config: RunConfig) -> None:
    def function() -> list[int]:
        first = train.get_checkpoint() is None
        loader = prepare_data_loader(DataLoader(Ids(100 if first else 90), 10, collate_fn=list))
        if not first:
            with pytest.warns(UserWarning, match="10 of its 100 items, .* it now has 90 items"):
                return list(chain(*loader))
        for _ in loader:
            save()
            die()
        return []

    assert restarted(function, run_config) == list(range(90))


@pytest.mark.parametrize(
    ("first", "second", "lengths"),
    [({}, {}, (2, 3)), ({"resume": False}, {}, (4, 3)), ({"name": "b"}, {"name": "a"}, (2, 3))],
)
def test_several_data_loaders_have_separate_positions(
    run_config: RunConfig, first: Any, second: Any, lengths: tuple[int, int]
) -> None:
    def function() -> tuple[int, int]:
        training = prepare_data_loader(DataLoader(Ids(4), collate_fn=list), **first)
        testing = prepare_data_loader(DataLoader(Ids(4), collate_fn=list), **second)
        if train.get_checkpoint() is None:
            running = iter(training), iter(testing)
            for each in (*running, running[0]):
                next(each)
            save()
            die()
        return len(list(training)), len(list(testing))

    assert restarted(function, run_config) == lengths


def test_data_loader_resume_keeps_length_of_complete_epoch(run_config: RunConfig) -> None:
    def function() -> int:
        loader = prepare_data_loader(DataLoader(Ids(40), 10, collate_fn=list))
        for _ in loader:
            if not saved():
                save()
                die()
            break
        return len(loader)

    assert restarted(function, run_config) == 4


def test_iteration_without_a_batch_ends_epoch(run_config: RunConfig) -> None:
    def function() -> list[list[int]]:
        short = prepare_data_loader(DataLoader(Ids(2), 2, collate_fn=list))
        long = prepare_data_loader(DataLoader(Ids(9), 2, collate_fn=list))
        epochs = []
        for _ in range(2):
            epochs.append([batch for _, batch in zip(short, long, strict=False)])
            if train.get_context().get_attempt() == 0:
                for _ in zip(short, long, strict=False):
                    save()
                    die()
        return epochs

    # The checkpoint has the end of an epoch of the short loader.
    assert restarted(function, run_config) == [[], [[0, 1]]]
