"""Position in streams of Hugging Face `datasets`.

A stream's `state_dict` is one of a single rank, and lacks the rows in shuffle buffers. Where it is
not exact, the rows that were consumed before a restart are read again and skipped. This is exact,
because a stream has the same order each time.
"""

from __future__ import annotations

import random
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from drawbar.torch._compat import has_exact_state
from drawbar.torch._data_position import EpochCounter

T = TypeVar("T")


def is_huggingface_stream(dataset: object) -> bool:
    """Return whether this is an `IterableDataset` of Hugging Face.

    Args:
        dataset: The dataset.

    Returns:
        True if it is; False also if `datasets` is not imported.

    Example:
        >>> is_huggingface_stream(load_dataset(name, split="train", streaming=True))
    """
    module = sys.modules.get("datasets")
    return module is not None and isinstance(dataset, module.IterableDataset)


class StreamTracker(EpochCounter):
    """Number of consumed samples in an epoch of a stream, and its state if the state is exact.

    Args:
        stream: The stream.
        batch_size: Number of samples in a batch of all ranks together.
        world_size: Number of ranks.
        reads_state: Whether the stream is read in this process.
    """

    def __init__(self, stream: Any, batch_size: int, world_size: int, *, reads_state: bool) -> None:
        super().__init__()
        self._stream = weakref.ref(stream)  # a running iteration keeps it alive
        self._batch_size = batch_size
        self._world_size = world_size
        self._has_exact_state = world_size == 1 and reads_state and has_exact_state(stream)
        self._recorded: dict[str, Any] | None = None
        self._is_state_loaded = self._has_begun = False
        self._consumed = 0

    def resume_from(self, state: Any) -> None:
        """Resume from a recorded position when the next iteration begins."""
        super().resume_from(state)
        self._recorded = dict(state) if state.get("consumed") else None
        if self._recorded and not self._has_exact_state:
            self._recorded.pop("state", None)

    def start_epoch(self) -> None:
        """Begin an iteration."""
        if self._has_begun:
            self._recorded = None  # the previous iteration ended before its first batch
        self._has_begun = True
        super().start_epoch()
        self._consumed = 0
        stream = self._stream()
        if stream is not None and (self._recorded is not None or self._is_state_loaded):
            # Without None, the stream would load a state again in each iteration.
            stream.load_state_dict(self._recorded and self._recorded.get("state"))
            self._is_state_loaded = self._recorded is not None

    def track(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches that were not consumed before the restart."""
        return super().track(self._count(batches))

    def _count(self, batches: Iterator[T]) -> Iterator[T]:
        if self._recorded is not None:
            self._skip(batches, self._recorded)
            self._recorded = None
        for batch in batches:
            self._consumed += self._batch_size
            yield batch

    def _skip(self, batches: Iterator[object], recorded: dict[str, Any]) -> None:
        stream = self._stream()
        if stream is None or stream.epoch != recorded["stream_epoch"]:  # `set_epoch` was called
            return
        num_batches, remainder = divmod(recorded["consumed"], self._batch_size)
        if "state" in recorded:
            self._consumed = recorded["consumed"]
        elif remainder or recorded["world_size"] != self._world_size:
            warnings.warn(
                f"The epoch of a Hugging Face stream begins again: {recorded['consumed']} of its "
                f"rows were consumed with a world size of {recorded['world_size']}, and cannot be "
                f"skipped with a world size of {self._world_size} and {self._batch_size} rows per "
                "batch of all ranks. To continue within an epoch, keep world size and batch size.",
                stacklevel=3,
            )
        else:
            with preserve_random_state():
                self._consumed = sum(self._batch_size for _ in islice(batches, num_batches))

    def position(self) -> object:
        """Return the position in the running epoch, or the next epoch."""
        stream = self._stream()
        if self._recorded is not None:
            return self._recorded
        if not self._is_running or not self._consumed or stream is None:
            return super().position()
        position = {
            "epoch": self._next - 1,
            "consumed": self._consumed,
            "world_size": self._world_size,
            "stream_epoch": stream.epoch,
        }
        return {**position, "state": stream.state_dict()} if self._has_exact_state else position


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the states of the global random generators at the end of the `with` block.

    These are the generators of Python, NumPy, and PyTorch, also on the current GPU.

    Returns:
        A context manager.

    Example:
        >>> with preserve_random_state():
        ...     next(batches)
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)
