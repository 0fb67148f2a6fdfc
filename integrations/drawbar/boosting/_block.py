"""Blocks: a shard's rows as numbers, a piece at a time, kept in memory or on disk."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

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


class Memory(Store):
    """Keeps the blocks in memory."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []

    def append(self, block: Block) -> None:
        """Keep a block."""
        self._blocks.append(block)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)


class Disk(Store):
    """Keeps the blocks in files, one at a time in memory; they go with this object.

    Args:
        folder: Where the files' own folder is made. Default: the system's folder for such.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="drawbar-", dir=folder))
        self._count = 0
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def append(self, block: Block) -> None:
        """Write a block."""
        with open(self._file(self._count), "wb") as file:
            for name, array in _arrays(block):
                np.save(file, np.array(name))
                # Of rows cut out of a block NumPy would not keep the order in memory.
                np.save(file, array if array.flags.forc else np.asfortranarray(array))
        self._count += 1

    def __iter__(self) -> Iterator[Block]:
        for number in range(self._count):
            with open(self._file(number), "rb") as file:
                arrays = {}
                while file.peek(1):
                    name = str(np.load(file))
                    arrays[name] = np.load(file)
            yield Block(**arrays)

    def _file(self, number: int) -> Path:
        return self.path / f"{number:06d}.npy"


def _arrays(block: Block) -> Iterator[tuple[str, Array]]:
    for field in fields(block):
        array = getattr(block, field.name)
        if array is not None:
            yield field.name, array
