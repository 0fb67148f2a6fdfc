"""Blocks: a shard's rows as numbers, a piece at a time, kept in memory or on disk."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some rows of a shard.

    Args:
        features: float32, (rows, features), column after column in memory, as Arrow has them; NaN
            is missing; a category is its code.
        label: float32, (rows,).
        weight: float32, (rows,).
        group: int64, (rows,): number of the row's query in this shard, ascending from 0. No query
            spans two blocks.
        base_margin: float32, (rows, columns): one column, or one for each class.
    """

    features: Array
    label: Array
    weight: Array | None = None
    group: Array | None = None
    base_margin: Array | None = None

    def __len__(self) -> int:
        return len(self.label)

    def columns(self) -> list[pa.Array]:
        """Give the features as Arrow's columns, where they lie.

        `pa.array` would import pandas, which takes 0.2 s.
        """
        return [
            pa.Array.from_buffers(pa.float32(), len(column), [None, pa.py_buffer(column)])
            for column in np.asfortranarray(self.features).T
        ]


def rows_of(block: Block, rows: slice) -> Block:
    """Give some rows of a block, without a copy."""
    return Block(**{name: array[rows] for name, array in _arrays(block)})


def joined(blocks: Sequence[Block]) -> Block:
    """Give the rows of several blocks as one."""
    if len(blocks) == 1:
        return blocks[0]
    names = [name for name, _ in _arrays(blocks[0])]
    return Block(**{name: np.concatenate([getattr(b, name) for b in blocks]) for name in names})


class Store(ABC):
    """Keeps blocks in the order in which they came."""

    @abstractmethod
    def append(self, block: Block) -> None:
        """Keep a block."""

    @abstractmethod
    def __iter__(self) -> Iterator[Block]:
        """Give the blocks; every iteration is a new pass."""

    @abstractmethod
    def empty(self) -> Store:
        """Make a store of this kind, in the same place."""


class Memory(Store):
    """Keeps the blocks in memory."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    def append(self, block: Block) -> None:
        """Keep a block."""
        self._blocks.append(block)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def empty(self) -> Memory:
        """Make another one."""
        return Memory()


class Disk(Store):
    """Keeps the blocks in a file without a name, of which nothing is left however the process ends.

    The blocks that it gives are views of the file: they take pages of the system's cache, no memory
    of this process, and may be used as long as one likes.

    Args:
        folder: Where the file is. Default: the system's folder for such.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._descriptor, path = tempfile.mkstemp(prefix="drawbar-", dir=folder)
        weakref.finalize(self, os.close, self._descriptor)
        self._sink = pa.OSFile(path, "wb")
        os.unlink(path)
        self._names: list[list[str]] = []  # of each block's arrays

    def append(self, block: Block) -> None:
        """Write a block."""
        arrays = dict(_arrays(block))
        for array in arrays.values():
            # Of rows cut out of a block Arrow would not keep the order in memory.
            whole = array if array.flags.forc else np.asfortranarray(array)
            pa.ipc.write_tensor(pa.Tensor.from_numpy(whole), self._sink)
        self._names.append(list(arrays))

    def __iter__(self) -> Iterator[Block]:
        if not self._names:
            return
        mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        reader = pa.BufferReader(pa.py_buffer(mapped))
        for names in self._names:
            yield Block(**{name: pa.ipc.read_tensor(reader).to_numpy() for name in names})

    def empty(self) -> Disk:
        """Make another one."""
        return Disk(self._folder)


def _arrays(block: Block) -> Iterator[tuple[str, Array]]:
    for field in fields(block):
        array = getattr(block, field.name)
        if array is not None:
            yield field.name, array
