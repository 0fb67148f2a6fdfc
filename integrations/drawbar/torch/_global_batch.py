"""Keep the global batch size: each optimizer step of an epoch has the same number of samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")


def iter_complete_steps(batches: Iterable[T], accumulation_steps: int) -> Iterator[T]:
    """Yield the batches of complete optimizer steps, without the remainder.

    Args:
        batches: Batches of this rank, from the start of a step.
        accumulation_steps: Number of batches of this rank per optimizer step.

    Yields:
        The batches.

    Example:
        >>> list(iter_complete_steps(range(7), 3))
        [0, 1, 2, 3, 4, 5]
    """
    iterator = iter(batches)
    while len(step := list(islice(iterator, accumulation_steps))) == accumulation_steps:
        yield from step


def check_epoch_size(num_samples: int, global_batch_size: int, *, drop_last: bool) -> None:
    """Check that all optimizer steps of an epoch have the global batch size.

    Args:
        num_samples: Samples of an epoch, of all ranks together.
        global_batch_size: Samples per optimizer step, of all ranks together.
        drop_last: Whether the samples of an incomplete last step are dropped.

    Raises:
        ValueError: The last step would have fewer samples, or there is no complete step.

    Example:
        >>> check_epoch_size(96, 48, drop_last=False)
    """
    remainder = num_samples % global_batch_size
    if num_samples < global_batch_size:
        raise ValueError(
            f"An epoch has {num_samples} samples, fewer than global_batch_size="
            f"{global_batch_size}. Set a smaller global_batch_size."
        )
    if remainder and not drop_last:
        raise ValueError(
            f"An epoch has {num_samples} samples, which is not a multiple of global_batch_size="
            f"{global_batch_size}, so its last optimizer step would depend on the number of "
            f"workers. Set drop_last=True in the data loader to drop the last {remainder} samples "
            "of each epoch, or change global_batch_size."
        )


def drop_incomplete_step(batch_sampler: Any, accumulation_steps: int) -> None:
    """Let a batch sampler of one rank drop the batches of an incomplete last optimizer step.

    Args:
        batch_sampler: The batch sampler, with a length. It is modified.
        accumulation_steps: Number of its batches per optimizer step.

    Example:
        >>> batch_sampler = BatchSampler(range(7), batch_size=1, drop_last=True)
        >>> drop_incomplete_step(batch_sampler, 3)
        >>> len(batch_sampler)
        6
    """
    if not hasattr(batch_sampler, "accumulation_steps"):
        batch_sampler.__class__ = _make_class(type(batch_sampler))
    batch_sampler.accumulation_steps = accumulation_steps


def _make_class(kind: type[Any]) -> type[Any]:
    """Return a subclass of a batch sampler that has only the batches of complete steps."""

    def get_length(self: Any) -> int:
        length: int = kind.__len__(self)
        return length - length % int(self.accumulation_steps)

    def iterate(self: Any) -> Iterator[Any]:
        return iter_complete_steps(kind.__iter__(self), self.accumulation_steps)

    # With a second base class, Python could not replace the class of an object.
    return type(kind.__name__, (kind,), {"__len__": get_length, "__iter__": iterate})
