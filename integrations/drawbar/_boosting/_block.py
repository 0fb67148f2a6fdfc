"""Blocks: a shard's rows as numbers, a piece at a time, kept in memory or on disk."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some rows of a shard.

    Args:
        features: float32 or float64, (rows,) for each feature; NaN is missing; a category is its
            code.
        label: float32, (rows,), or (rows, outputs) if there are several.
        weight: float32, (rows,).
        group: int64, (rows,): number of the row's query in this shard, ascending from 0. No query
            spans two blocks.
        base_margin: float32, (rows, columns): one column, or one for each class.
        shared: Numbers of the features that take no memory of this process: they lie in Ray's
            object store, or in a mapped file.
    """

    features: tuple[Array, ...]
    label: Array
    weight: Array | None = None
    group: Array | None = None
    base_margin: Array | None = None
    shared_features: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.label)

    def to_arrow(self) -> list[pa.Array]:
        """Give the features as Arrow's columns, where they lie.

        `pa.array` would import pandas, which takes 0.2 s.
        """
        return [
            pa.Array.from_buffers(
                _ARROW_TYPES[each.dtype.name], len(each), [None, pa.py_buffer(each)]
            )
            for each in self.features
        ]

    def to_numpy(self) -> Array:
        """Give the features as (rows, features), which is a copy."""
        return np.stack(self.features, axis=1)

    def map(self, function: Callable[[Array], Array], *, skip_shared: bool = False) -> Block:
        """Give a block of arrays that a function makes of this one's.

        Args:
            function: Called with each array, always in the same order.
            own: Leave the shared features as they are.
        """
        features = tuple(
            array if skip_shared and number in self.shared_features else function(array)
            for number, array in enumerate(self.features)
        )
        other_arrays = {name: getattr(self, name) for name in _NON_FEATURE_FIELDS}
        changed: dict[str, Any] = {
            name: function(array) for name, array in other_arrays.items() if array is not None
        }
        return replace(self, features=features, **changed)


_ARROW_TYPES = {"float32": pa.float32(), "float64": pa.float64()}
_NON_FEATURE_FIELDS = ("label", "weight", "group", "base_margin")


def slice_block(block: Block, rows: slice) -> Block:
    """Give some rows of a block, without a copy."""
    return block.map(lambda array: array[rows])


def concat_blocks(blocks: Sequence[Block]) -> Block:
    """Give the rows of several blocks as one."""
    if len(blocks) == 1:
        return blocks[0]
    features = zip(*(block.features for block in blocks), strict=True)
    other_arrays = {
        name: [getattr(block, name) for block in blocks] for name in _NON_FEATURE_FIELDS
    }
    whole: dict[str, Any] = {
        name: np.concatenate(each) for name, each in other_arrays.items() if each[0] is not None
    }
    return Block(features=tuple(map(np.concatenate, features)), **whole)


class BlockStore(ABC):
    """Keeps blocks in the order in which they came."""

    @abstractmethod
    def append(self, block: Block) -> None:
        """Keep a block."""

    @abstractmethod
    def __iter__(self) -> Iterator[Block]:
        """Give the blocks; every iteration is a new pass."""

    @abstractmethod
    def new_empty(self) -> BlockStore:
        """Make a store of this kind, in the same place."""


class MemoryBlockStore(BlockStore):
    """Keeps the blocks in memory."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    def append(self, block: Block) -> None:
        """Keep a block."""
        self._blocks.append(block)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def new_empty(self) -> MemoryBlockStore:
        """Make another one."""
        return MemoryBlockStore()


class DiskBlockStore(BlockStore):
    """Keeps the blocks in a file without a name, of which nothing is left however the process ends.

    The blocks that it gives are views of the file: they take pages of the system's cache, no memory
    of this process, and may be used as long as one likes. Features that are shared already stay
    where they are.

    Args:
        folder: Where the file is. Default: the system's folder for such.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._descriptor, path = tempfile.mkstemp(prefix="drawbar-", dir=folder)
        weakref.finalize(self, os.close, self._descriptor)
        self._sink = pa.OSFile(path, "wb")
        os.unlink(path)
        self._blocks: list[Block] = []  # with nothing where an array is in the file

    def append(self, block: Block) -> None:
        """Write a block."""
        self._blocks.append(block.map(self._write, skip_shared=True))

    def _write(self, array: Array) -> Array:
        pa.ipc.write_tensor(pa.Tensor.from_numpy(array), self._sink)
        return np.empty(0, dtype=array.dtype)

    def __iter__(self) -> Iterator[Block]:
        if not self._blocks:
            return
        mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        reader = pa.BufferReader(pa.py_buffer(mapped))
        for block in self._blocks:
            whole = block.map(lambda _: pa.ipc.read_tensor(reader).to_numpy(), skip_shared=True)
            yield replace(whole, shared_features=frozenset(range(len(whole.features))))

    def new_empty(self) -> DiskBlockStore:
        """Make another one."""
        return DiskBlockStore(self._folder)
