"""Datasets and samplers of the scenarios that use a framework's own loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, WeightedRandomSampler

Row = dict[str, torch.Tensor]


def make_row(index: int) -> Row:
    """Return the row of an index."""
    return {"x": torch.tensor([float(index)])}


class Rows(Dataset[Row]):
    """Rows whose value is their index."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        return make_row(index)


class Stream(IterableDataset[Row]):
    """Rows in their order, without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def draw(self) -> list[int]:
        """Return the order of an epoch."""
        return [*range(self.count)]

    def __iter__(self) -> Iterator[Row]:
        return map(make_row, self.draw())


class EpochStream(Stream):
    """Rows in an order that follows from the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch."""
        self.epoch = epoch

    def draw(self) -> list[int]:
        """Return the order of an epoch."""
        generator = torch.Generator().manual_seed(self.epoch)
        return torch.randperm(self.count, generator=generator).tolist()


class RandomStream(Stream):
    """Rows in an order from PyTorch's global generator."""

    def draw(self) -> list[int]:
        """Return the order of an epoch."""
        return torch.randperm(self.count).tolist()


class SizedRandomStream(RandomStream):
    """A random stream with a length."""

    def __len__(self) -> int:
        return self.count


class EpochSampler(Sampler[int]):
    """A sampler whose order follows from its epoch."""

    def __init__(self, count: int) -> None:
        self._stream = EpochStream(count)

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch."""
        self._stream.set_epoch(epoch)

    def __len__(self) -> int:
        return self._stream.count

    def __iter__(self) -> Iterator[int]:
        return iter(self._stream.draw())


class UnsizedSampler(Sampler[int]):
    """A sampler without a length that draws from PyTorch's global generator."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self._count).tolist())


def make_huggingface_stream(count: int, *, has_shuffle_buffer: bool) -> Any:
    """Return a stream in two shards."""
    rows = datasets.Dataset.from_dict({"x": [[float(index)] for index in range(count)]})
    stream = rows.with_format("torch").to_iterable_dataset(num_shards=min(2, count))
    return stream.shuffle(seed=3, buffer_size=5) if has_shuffle_buffer else stream


def make_dataset(kind: str, count: int) -> Any:
    """Return a dataset by its kind; rows for the kinds of samplers."""
    streams = {
        "stream": Stream,
        "epoch_stream": EpochStream,
        "random_stream": RandomStream,
        "sized_random_stream": SizedRandomStream,
    }
    if kind.startswith("huggingface"):
        return make_huggingface_stream(count, has_shuffle_buffer=kind.endswith("shuffled"))
    return streams[kind](count) if kind in streams else Rows(count)


def make_sampler(kind: str, count: int) -> Sampler[int] | None:
    """Return a sampler by its kind; None for the default one."""
    if kind == "weighted":
        return WeightedRandomSampler([1.0] * count, count)
    if kind == "weighted_with_generator":
        generator = torch.Generator().manual_seed(5)
        return WeightedRandomSampler([1.0] * count, count, generator=generator)
    kinds = {"epoch_sampler": EpochSampler, "unsized_sampler": UnsizedSampler}
    return kinds[kind](count) if kind in kinds else None


def read_rows(batch: Row) -> list[int]:
    """Return the indices of a batch."""
    return [int(value) for value in batch["x"].flatten()]
