"""Average the gradients of a DDP model so that a failed collective can be repeated.

DDP's own buckets follow the order of the gradients in the first backward pass, so they differ in a
process that joins later. A communication hook therefore copies the gradients into buckets whose
layout depends only on the model. DDP's own gradients change when all ranks have averaged, so they
are still there when a collective has failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import (  # type: ignore[attr-defined]  # public, not in its __all__
    GradBucket,
    Work,
)

from drawbar.torch._replica_group import ReplicaGroup

FIRST_BUCKET_BYTES = 1024 * 1024
"""Size of the first bucket, which is reduced while the others are computed. As in DDP."""

BUCKET_BYTES = 25 * 1024 * 1024


@dataclass
class _Slot:
    """Place of the gradient of one parameter in a bucket.

    Attributes:
        average: Average over all ranks, a part of the bucket.
        gradient: Gradient of this rank, in a bucket of DDP.
    """

    average: torch.Tensor
    gradient: torch.Tensor | None = None


@dataclass(eq=False)
class _Bucket:
    """Gradients that are reduced together.

    Attributes:
        averages: Averages over all ranks.
        slots: Places of the gradients.
        work: The collective; None if it has not started.
    """

    averages: torch.Tensor
    slots: list[_Slot]
    work: Work | None = None

    @property
    def is_complete(self) -> bool:
        """True if all gradients of this rank are there."""
        return self.work is not None or all(slot.gradient is not None for slot in self.slots)


class GradientBuckets:
    """Gradients of one model, as a communication hook of DDP.

    Args:
        model: The model.
        world_size: Number of ranks.
        get_group: Returns the current group.
        finish: Called with `reduce` when all gradients of a backward pass are there. It returns
            when they are averaged on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        get_group: Callable[[], ReplicaGroup],
        finish: Callable[[GradientBuckets], None],
    ) -> None:
        self._world_size = world_size
        self._get_group = get_group
        self._finish = finish
        self._slots: dict[torch.Tensor, _Slot] = {}
        self._buckets: list[_Bucket] = []
        self._waiting: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        # The gradients of the last parameters are there first.
        params = [param for param in model.parameters() if param.requires_grad][::-1]
        for group in _split(params):
            self._add_bucket(group)

    def _add_bucket(self, params: list[nn.Parameter]) -> None:
        averages = torch.empty(sum(param.numel() for param in params), dtype=params[0].dtype)
        parts = torch.split(averages, [param.numel() for param in params])
        slots = [_Slot(part.view(param.shape)) for param, part in zip(params, parts, strict=True)]
        self._slots.update(zip(params, slots, strict=True))
        self._buckets.append(_Bucket(averages, slots))

    def reset(self) -> None:
        """Begin a backward pass."""
        self._waiting.clear()
        for slot in self._slots.values():
            slot.gradient = None
        for bucket in self._buckets:
            bucket.work = None

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Keep the gradients of a bucket of DDP, and return the future of their averages."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._waiting.append((future, bucket.buffer()))
        for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._slots[param].gradient = gradient
        if not all(own_bucket.is_complete for own_bucket in self._buckets):
            self._start_complete()
            return future
        self._finish(self)
        for slot in self._slots.values():
            assert slot.gradient is not None  # the buckets are complete
            slot.gradient.copy_(slot.average)
        waiting = self._waiting.copy()
        self.reset()
        for ddp_future, buffer in waiting:
            ddp_future.set_result(buffer)
        return future

    def _start_complete(self) -> None:
        """Start the collectives of complete buckets, in the same order on all ranks."""
        try:
            for bucket in self._buckets:
                if not bucket.is_complete:
                    return
                self._start(bucket)
        except RuntimeError:
            return  # `reduce` raises it again

    def _start(self, bucket: _Bucket) -> None:
        if bucket.work is None:
            for slot in bucket.slots:
                assert slot.gradient is not None  # the bucket is complete
                torch.div(slot.gradient, self._world_size, out=slot.average)
            bucket.work = self._get_group().start_sum(bucket.averages)

    def reduce(self) -> None:
        """Average all gradients over the ranks.

        Raises:
            RuntimeError: A collective has failed.
        """
        for bucket in self._buckets:
            self._start(bucket)
        for bucket in self._buckets:
            assert bucket.work is not None  # it has started
            bucket.work.wait()

    def prepare_repetition(self) -> None:
        """Wait until failed collectives have ended, so that `reduce` can begin again."""
        for bucket in self._buckets:
            if bucket.work is not None:
                with contextlib.suppress(RuntimeError):
                    bucket.work.wait()
                bucket.work = None


def _split(params: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Yield consecutive parameters of one dtype, for one bucket each."""
    group: list[nn.Parameter] = []
    num_bytes, limit = 0, FIRST_BUCKET_BYTES
    for param in params:
        size = param.numel() * param.element_size()
        if group and (param.dtype != group[0].dtype or num_bytes + size > limit):
            yield group
            group, num_bytes, limit = [], 0, BUCKET_BYTES
        group.append(param)
        num_bytes += size
    if group:
        yield group
