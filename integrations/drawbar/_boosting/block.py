"""Blocks of numeric rows, stored on disk."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows of a shard.

    Args:
        features: float32 or float64, (rows,) for each feature. NaN is missing. Categories are
            stored as codes.
        label: float32, (rows,), or (rows, outputs) for several outputs.
        weight: float32, (rows,).
        group: int64, (rows,): index of the row's query in this shard, ascending from 0. No query
            spans two blocks.
        base_margin: float32, (rows, columns): one column, or one for each class.
        shared_features: Indices of features that take no memory of this process, because they are
            in Ray's object store or in a mapped file.
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
        """Return the features as Arrow arrays without a copy.

        `pa.array` would import pandas, which takes 0.2 s.
        """
        return [
            pa.Array.from_buffers(
                _ARROW_TYPES[array.dtype.name], len(array), [None, pa.py_buffer(array)]
            )
            for array in self.features
        ]

    def to_numpy(self) -> Array:
        """Return a copy of the features with shape (rows, features)."""
        return np.stack(self.features, axis=1)

    def map(self, function: Callable[[Array], Array], *, skip_shared: bool = False) -> Block:
        """Apply a function to all arrays and return a new block.

        Args:
            function: Called with each array, always in the same order.
            skip_shared: Whether to keep shared features unchanged.
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
    """Return a range of rows of a block without a copy."""
    return block.map(lambda array: array[rows])


def concat_blocks(blocks: Sequence[Block]) -> Block:
    """Concatenate the rows of several blocks."""
    if len(blocks) == 1:
        return blocks[0]
    features = zip(*(block.features for block in blocks), strict=True)
    other_arrays = {
        name: [getattr(block, name) for block in blocks] for name in _NON_FEATURE_FIELDS
    }
    concatenated: dict[str, Any] = {
        name: np.concatenate(arrays)
        for name, arrays in other_arrays.items()
        if arrays[0] is not None
    }
    return Block(features=tuple(map(np.concatenate, features)), **concatenated)


class BlockStore:
    """Ordered storage of blocks in an unnamed file, which is deleted however the process ends.

    The blocks are views of the mapped file. They use the page cache instead of process memory and
    stay valid without a time limit. Features that are already shared are not written.

    XGBoost reads the rows in four passes. In memory, rows and bins would take 1.7 times the rows.
    LightGBM would hold the rows in addition to its sample and bins.

    Args:
        folder: Directory of the file. Default: the system's temporary directory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._descriptor, path = tempfile.mkstemp(prefix="drawbar-", dir=folder)
        weakref.finalize(self, os.close, self._descriptor)
        self._sink = pa.OSFile(path, "wb")
        os.unlink(path)
        self._blocks: list[Block] = []  # with empty arrays in place of those in the file

    def append(self, block: Block) -> None:
        """Write a block to the file."""
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
            loaded = block.map(lambda _: pa.ipc.read_tensor(reader).to_numpy(), skip_shared=True)
            yield replace(loaded, shared_features=frozenset(range(len(loaded.features))))

    def new_empty(self) -> BlockStore:
        """Create an empty store in the same directory."""
        return BlockStore(self._folder)
