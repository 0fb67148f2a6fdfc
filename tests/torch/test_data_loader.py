"""Tests of prepare_data_loader: settings of the loader, and splitting of its samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

from drawbar.torch import enable_reproducibility, prepare_data_loader
from drawbar.train import Result, get_context


def numbers(count: int = 10) -> Any:
    return TensorDataset(torch.arange(count))


def collate(samples: list[tuple[torch.Tensor]]) -> list[int]:
    return [int(x) for (x,) in samples]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def test_prepare_data_loader_keeps_settings(fit: Callable[..., Result]) -> None:
    options: dict[str, Any] = {"in_order": False} if "in_order" in SETTINGS else {}
    loader = DataLoader(
        numbers(),
        batch_size=3,
        num_workers=2,
        collate_fn=collate,
        drop_last=True,
        timeout=5,
        worker_init_fn=print,
        multiprocessing_context="spawn",
        generator=torch.Generator(),
        prefetch_factor=7,
        persistent_workers=True,
        **options,
    )
    prepared = fit(lambda: settings(prepare_data_loader(loader)) == settings(loader))
    assert prepared.return_value


SETTINGS = {
    *(
        "batch_size",
        "num_workers",
        "collate_fn",
        "drop_last",
        "timeout",
        "worker_init_fn",
        "dataset",
    ),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers"),
    *(["in_order"] if "in_order" in inspect.signature(DataLoader).parameters else []),  # torch 2.6
}


def settings(loader: DataLoader[Any]) -> dict[str, Any]:
    assert isinstance(loader, DataLoader)
    return {name: getattr(loader, name) for name in SETTINGS}


class Tagged(DataLoader[Any]):
    """Loader subclass with an additional attribute and a custom `__iter__`."""

    tag = "mine"

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from (self.tag, *super().__iter__())


def test_prepare_data_loader_keeps_subclass(fit: Callable[..., Result]) -> None:
    def function() -> Any:
        loader = prepare_data_loader(Tagged(numbers(2), collate_fn=collate))
        return list(loader), loader.tag, len(loader)  # type: ignore[attr-defined]

    assert fit(function).return_value == (["mine", [0], [1]], "mine", 2)


def test_prepare_data_loader_does_not_change_original(fit: Callable[..., Result]) -> None:
    loader = DataLoader(numbers(), shuffle=True)
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    fit(lambda: len(prepare_data_loader(loader)))
    assert loader.sampler is sampler
    assert loader.batch_sampler is batch_sampler


def test_prepare_data_loader_order_changes_only_with_shuffle(fit: Callable[..., Result]) -> None:
    def function() -> Any:
        sequential = prepare_data_loader(DataLoader(numbers(), 4, collate_fn=collate))
        shuffled = prepare_data_loader(DataLoader(numbers(), 4, shuffle=True, collate_fn=collate))
        return [flat(loader) for loader in (sequential, sequential, shuffled, shuffled)]

    one, two, three, four = fit(function).return_value
    assert one == two == sorted(three) == sorted(four) == list(range(10))
    assert three != four != one != three


def test_generator_of_the_loader_seeds_the_order(fit: Callable[..., Result]) -> None:
    def function() -> Any:
        orders = []
        for number, seed in enumerate((1, 1, 2)):
            generator = torch.Generator().manual_seed(seed)
            state = generator.get_state()
            loader = DataLoader(numbers(), shuffle=True, generator=generator, collate_fn=collate)
            orders.append(list(prepare_data_loader(loader, name=f"loader {number}")))
            assert torch.equal(generator.get_state(), state)
        return orders

    one, again, other = fit(function).return_value
    assert one == again != other


class EvenFirst(BatchSampler):
    """A custom batch sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 2], [4, 6], [1, 3])

    def __len__(self) -> int:
        return 3


def test_prepare_data_loader_keeps_custom_batch_sampler(fit: Callable[..., Result]) -> None:
    batches = EvenFirst(SequentialSampler(range(8)), 2, False)
    loader = DataLoader(numbers(), batch_sampler=batches, collate_fn=collate)
    result = fit(lambda: list(prepare_data_loader(loader)))
    assert result.return_value == [[0, 2], [4, 6], [1, 3]]


def test_set_epoch_of_a_loader_with_batch_sampler_sets_the_order(
    fit: Callable[..., Result],
) -> None:
    def function() -> Any:
        batches = BatchSampler(RandomSampler(range(10)), 3, drop_last=False)
        loader = prepare_data_loader(
            DataLoader(numbers(), batch_sampler=batches, collate_fn=collate)
        )
        orders = [list(loader) for _ in range(3)]
        loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
        return orders, list(loader)

    orders, again = fit(function).return_value
    assert again == orders[1] != orders[0]


def test_prepare_data_loader_without_batching_yields_items(fit: Callable[..., Result]) -> None:
    loader = DataLoader(numbers(3), batch_size=None)
    result = fit(lambda: [int(x) for (x,) in prepare_data_loader(loader)])
    assert result.return_value == [0, 1, 2]


def test_prepare_data_loader_keeps_distributed_sampler(fit: Callable[..., Result]) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(numbers(), num_replicas=2, rank=1)
    loader = DataLoader(numbers(), sampler=sampler)
    assert fit(lambda: prepare_data_loader(loader).sampler is sampler).return_value


class Stream(IterableDataset[int]):
    """Numbers as they come."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_prepare_data_loader_does_not_split_iterable_dataset(fit: Callable[..., Result]) -> None:
    loader: DataLoader[Any] = DataLoader(Stream(), batch_size=2, collate_fn=list)
    assert fit(lambda: list(prepare_data_loader(loader))).return_value == [[0, 1], [2]]


def test_prepare_data_loader_called_twice_splits_once(fit: Callable[..., Result]) -> None:
    def function() -> bool:
        loader = prepare_data_loader(DataLoader(numbers()))
        return prepare_data_loader(loader) is loader

    assert fit(function).return_value


def test_prepare_data_loader_of_other_type_raises(fit: Callable[..., Result]) -> None:
    def function() -> None:
        with pytest.raises(TypeError, match=r"needs a torch.utils.data.DataLoader, found \[1\]"):
            prepare_data_loader([1])  # type: ignore[arg-type]

    fit(function)


@pytest.mark.usefixtures("ray_cluster")
def test_data_loader_on_two_ranks_splits_data_and_seeds(fit: Callable[..., Result]) -> None:
    class Augmented(torch.utils.data.Dataset[tuple[int, float]]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> tuple[int, float]:
            assert get_worker_info() is not None
            return index, float(torch.rand(()))

    def function() -> list[Any]:
        torch.manual_seed(get_context().get_world_rank())  # ranks that start apart
        unseeded = prepare_data_loader(DataLoader(numbers(), 2, shuffle=True, collate_fn=collate))
        orders: list[Any] = [flat(unseeded) for _ in range(2)]
        enable_reproducibility(5)
        loader: Any = DataLoader(Augmented(), 5, shuffle=True, num_workers=1, collate_fn=list)
        return [*orders, *(batch for batch in prepare_data_loader(loader))]

    ranks = fit(function, num_workers=2).return_values
    for epoch in range(2):
        assert sorted(ranks[0][epoch] + ranks[1][epoch]) == list(range(10))
    assert ranks[0][0] != ranks[0][1]
    assert not {noise for _, noise in ranks[0][2]} & {noise for _, noise in ranks[1][2]}
