"""Average the gradients of a DDP model so that a failed collective can be repeated.

DDP's own buckets follow the order of the gradients in the first backward pass, so they differ in a
process that joins later. A communication hook therefore copies the gradients into buckets whose
layout depends only on the model. The copies are the gradients of this rank, which are still there
when a collective has failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

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


@dataclass(eq=False)
class _Bucket:
    """Gradients that are reduced together.

    Attributes:
        own: Gradients of this rank, divided by the number of ranks.
        reduced: Average over all ranks.
        num_missing: Number of parameters whose gradients are not there yet.
        num_params: Number of parameters.
        work: The collective; None if it has not started.
    """

    own: torch.Tensor
    reduced: torch.Tensor
    num_params: int
    num_missing: int = 0
    work: Work | None = None


@dataclass
class _Slot:
    """Place of the gradient of one parameter in a bucket."""

    bucket: _Bucket
    own: torch.Tensor
    reduced: torch.Tensor


@dataclass
class _Waiting:
    """Bucket of DDP that waits for its averages."""

    future: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    gradients: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


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
        self._waiting: list[_Waiting] = []
        # The gradients of the last parameters are there first.
        params = [param for param in model.parameters() if param.requires_grad][::-1]
        for group in _split(params):
            self._add_bucket(group)
        self.reset()

    def _add_bucket(self, params: list[nn.Parameter]) -> None:
        size, dtype = sum(param.numel() for param in params), params[0].dtype
        own = torch.zeros(size, dtype=dtype)
        bucket = _Bucket(own, torch.empty_like(own), len(params))
        offset = 0
        for param in params:
            view = slice(offset, offset + param.numel())
            self._slots[param] = _Slot(
                bucket, own[view].view(param.shape), bucket.reduced[view].view(param.shape)
            )
            offset += param.numel()
        self._buckets.append(bucket)

    def reset(self) -> None:
        """Begin a backward pass."""
        self._waiting.clear()
        for bucket in self._buckets:
            bucket.num_missing, bucket.work = bucket.num_params, None

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Copy the gradients of a bucket of DDP, and return the future of their averages."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        self._waiting.append(_Waiting(future, bucket.buffer(), pairs))
        for param, gradient in pairs:
            slot = self._slots[param]
            torch.div(gradient, self._world_size, out=slot.own)
            slot.bucket.num_missing -= 1
        if any(own_bucket.num_missing for own_bucket in self._buckets):
            self._start_complete()
            return future
        self._finish(self)
        waiting, self._waiting = self._waiting, []
        for ddp_bucket in waiting:
            for param, gradient in ddp_bucket.gradients:
                gradient.copy_(self._slots[param].reduced)
        for ddp_bucket in waiting:
            ddp_bucket.future.set_result(ddp_bucket.buffer)
        self.reset()
        return future

    def _start_complete(self) -> None:
        """Start the collectives of complete buckets, in the same order on all ranks."""
        try:
            for bucket in self._buckets:
                if bucket.num_missing:
                    return
                self._start(bucket)
        except RuntimeError:
            return  # `reduce` raises it again

    def _start(self, bucket: _Bucket) -> None:
        if bucket.work is None:
            bucket.reduced.copy_(bucket.own)
            bucket.work = self._get_group().start_sum(bucket.reduced)

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
