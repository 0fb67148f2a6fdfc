"""Copies of a checkpoint on this node, which this process reads instead of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from drawbar._storage.storage_path import StoragePath

OpenCopy = Callable[[StoragePath], AbstractContextManager[Path | None]]
"""Provides the directory of a copy of a checkpoint; None if there is no copy."""

_sources: list[OpenCopy] = []


@contextmanager
def use_copies(source: OpenCopy) -> Iterator[None]:
    """Let this process read checkpoints from copies while the block runs."""
    _sources.append(source)
    try:
        yield
    finally:
        _sources.remove(source)


@contextmanager
def open_copy(path: StoragePath) -> Iterator[Path | None]:
    """Provide the directory of a copy; None if there is no copy.

    Args:
        path: Path of the checkpoint.
    """
    if not _sources:
        yield None
        return
    with _sources[-1](path) as copy:
        yield copy
